//! Threads that run reactors: started, pinned to a CPU, reached through their mailboxes, stopped.

use std::thread::JoinHandle;
use std::time::Duration;

use crate::arena::Arena;
use crate::buffer::BufferPool;
use crate::executor::{Order, Reactor};
use crate::mailbox::{Sender, mailbox};
use crate::registry::Key;
use crate::uring::gauges::Gauges;
use crate::uring::probe::remedy;
use crate::uring::{Settings, UringBackend};

/// One reactor thread, as other threads see it. Dropping it stops the reactor.
pub struct Core {
    cpu: usize,
    sender: Sender,
    gauges: Key<Gauges>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    #[error("CPU {cpu} cannot be used: {error}; `nproc` and `taskset -p $$` show which can")]
    Pin { cpu: usize, error: std::io::Error },
    #[error("io_uring cannot be used: {0}; {fix}", fix = remedy(.0))]
    Uring(std::io::Error),
    #[error("the reactor's thread cannot be started: {0}")]
    Thread(std::io::Error),
}

impl Core {
    /// Starts a reactor on `cpu`. `poll_window`: how long it looks for work before it sleeps.
    pub fn start(cpu: usize, poll_window: Duration) -> Result<Core, CoreError> {
        Core::start_with(cpu, poll_window, Settings::default())
    }

    /// The same, with an io_uring as chosen.
    pub fn start_with(
        cpu: usize,
        poll_window: Duration,
        settings: Settings,
    ) -> Result<Core, CoreError> {
        let (sender, receiver) = mailbox().map_err(CoreError::Thread)?;
        let (report, started) = std::sync::mpsc::channel();
        let body = move || {
            // Made on the CPU that will use it: its memory is near.
            let arena = pin(cpu).map(|()| Arena::new());
            let backend = arena.and_then(|arena| {
                let backend = UringBackend::with(settings, Some(arena.clone()));
                backend.map(|backend| (backend, arena)).map_err(CoreError::Uring)
            });
            let (backend, arena) = match backend {
                Ok(made) => made,
                Err(error) => {
                    let _ = report.send(Err(error));
                    return;
                }
            };
            let gauges = backend.gauges();
            let pool = BufferPool::on(arena);
            let reactor = Reactor::with_pool(Box::new(backend), Order::Fifo, pool);
            reactor.set_poll_window(poll_window);
            reactor.spawn(receiver.serve(reactor.clone()));
            let _ = report.send(Ok(reactor.publish(gauges)));
            reactor.run();
        };
        let thread = std::thread::Builder::new()
            .name(format!("reactor-{cpu}"))
            .spawn(body)
            .map_err(CoreError::Thread)?;
        let gauges = started
            .recv()
            .map_err(|_| CoreError::Thread(std::io::Error::other("it ended early")))??;
        Ok(Core { cpu, sender, gauges, thread: Some(thread) })
    }

    pub fn cpu(&self) -> usize {
        self.cpu
    }

    pub fn sender(&self) -> &Sender {
        &self.sender
    }

    /// What its backend does, for letters to its reactor.
    pub fn gauges(&self) -> Key<Gauges> {
        self.gauges
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let _ = self.sender.send(Reactor::stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Keeps the calling thread on `cpu`.
pub fn pin(cpu: usize) -> Result<(), CoreError> {
    if cpu >= libc::CPU_SETSIZE.unsigned_abs() as usize {
        let error = std::io::Error::from_raw_os_error(libc::EINVAL);
        return Err(CoreError::Pin { cpu, error });
    }
    // SAFETY: `set` is plain data, written by CPU_SET and read by the call, both inside its size.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result == 0 {
        return Ok(());
    }
    Err(CoreError::Pin { cpu, error: std::io::Error::last_os_error() })
}
