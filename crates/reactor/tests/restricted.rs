//! Goal: a kernel that allows only a part of io_uring is used with that part; one that allows none
//! is told with what mends it.
//! Method: a thread that forbids itself system calls, as the seccomp profile of a container does.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_reactor::arena::Arena;
use ashlar_reactor::buffer::BufferPool;
use ashlar_reactor::cores::CoreError;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, Errno, Op};
use ashlar_reactor::uring::gauges::{Gauges, Use, Why};
use ashlar_reactor::uring::{Settings, UringBackend};

/// Classic BPF, as in seccomp(2): the call's number is the first word of what the filter is given.
fn forbid(call: libc::c_long, errno: i32) {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf: 0,
        k,
    };
    let number = u32::try_from(call).unwrap();
    let is_call = libc::sock_filter {
        jf: 1,
        ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number)
    };
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap();
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is_call,
        statement(libc::BPF_RET | libc::BPF_K, refuse),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: `program` and `filter` are as the kernel reads them, and it copies them.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

/// For a thread that ends with the test: it never gets the call back.
fn with_forbidden<T: Send + 'static>(
    call: libc::c_long,
    errno: i32,
    test: impl FnOnce() -> T + Send + 'static,
) -> T {
    let thread = std::thread::spawn(move || {
        forbid(call, errno);
        test()
    });
    thread.join().unwrap()
}

fn backend() -> std::io::Result<(UringBackend, Rc<BufferPool>)> {
    let arena = Arena::new();
    let backend = UringBackend::with(Settings::default(), Some(arena.clone()))?;
    Ok((backend, BufferPool::on(arena)))
}

fn write_and_read(backend: UringBackend, pool: Rc<BufferPool>) -> Rc<Gauges> {
    let gauges = backend.gauges();
    let reactor = Reactor::with_pool(Box::new(backend), Order::Fifo, pool);
    let name = format!("ashlar-restricted-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(1 << 20).unwrap();
    let r = reactor.clone();
    let ran = reactor.block_on(async move {
        let device = r.register(Device::File { file: Arc::new(file) });
        let from = r.buffer(4096);
        from.copy_from_slice(&[7; 4096]);
        let write = Op::Write { device, offset: 4096, from: from.into() };
        assert_eq!(r.submit(write).await, Ok(4096));
        assert_eq!(r.submit(Op::Flush { device }).await, Ok(0));
        let into = r.buffer(8192);
        let read = Op::Read { device, offset: 0, into: into.clone().into() };
        assert_eq!(r.submit(read).await, Ok(8192));
        assert_eq!((into.bytes()[0], into.bytes()[4096]), (0, 7));
    });
    assert!(ran.is_some());
    gauges
}

#[test]
fn without_registration_all_else_works() {
    with_forbidden(libc::SYS_io_uring_register, libc::EPERM, || {
        let (backend, pool) = backend().unwrap();
        let gauges = write_and_read(backend, pool);
        let report = gauges.report(ashlar_reactor::backend::Instant::MAX);
        let refused = Use::No(Why::Refused(Errno(libc::EPERM)));
        assert_eq!((report.devices[0].file, report.devices[0].buffers), (refused, refused));
        assert!(report.kernel.operations.is_empty());
    });
}

#[test]
fn without_rings_there_is_a_fix() {
    for (errno, fix) in [(libc::EPERM, "io_uring_disabled=0"), (libc::ENOSYS, "CONFIG_IO_URING")] {
        let error = with_forbidden(libc::SYS_io_uring_setup, errno, || backend().err().unwrap());
        assert_eq!(error.raw_os_error(), Some(errno));
        let told = CoreError::Uring(error).to_string();
        assert!(told.contains(fix), "{told}");
    }
}
