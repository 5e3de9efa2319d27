//! What the kernel has of io_uring: asked for, never assumed.

use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::op::Errno;

/// Entries of a submission ring; more operations wait.
const ENTRIES: u32 = 1024;
/// How many of its threads the kernel lets do what cannot be done without waiting, for one reactor.
/// Each waits for one operation: were they few (four a CPU, unless it is told), what one file
/// system keeps waiting would hold up the drives of all others.
const WORKERS: u32 = ENTRIES;
/// How long the kernel's thread looks for submissions before it sleeps, in milliseconds.
const THREAD_IDLE_MS: u32 = 10;

/// How completions come, and who submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Devices tell by interrupts.
    Interrupts,
    /// The same, and a thread of the kernel takes submissions without a system call.
    Sqpoll,
    /// Devices are looked at.
    Polled,
    /// Interrupts, entries of twice the size, and another ring that waits for its completions.
    Wide,
}

pub(super) type WideRing = IoUring<squeue::Entry128, cqueue::Entry32>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flag {
    SingleIssuer,
    DeferTaskrun,
    CoopTaskrun,
    TellTaskrun,
    SubmitAll,
    Sqpoll,
    Iopoll,
}

impl Flag {
    /// As in io_uring_setup(2).
    fn name(self) -> &'static str {
        match self {
            Flag::SingleIssuer => "SINGLE_ISSUER",
            Flag::DeferTaskrun => "DEFER_TASKRUN",
            Flag::CoopTaskrun => "COOP_TASKRUN",
            Flag::TellTaskrun => "TASKRUN_FLAG",
            Flag::SubmitAll => "SUBMIT_ALL",
            Flag::Sqpoll => "SQPOLL",
            Flag::Iopoll => "IOPOLL",
        }
    }
}

/// What is asked for, the best first. Linux 6.1, 6.0, 5.19, and before.
const USUAL: [&[Flag]; 4] = {
    use Flag::{CoopTaskrun, DeferTaskrun, SingleIssuer, SubmitAll, TellTaskrun};
    [
        &[SingleIssuer, DeferTaskrun, TellTaskrun, SubmitAll],
        &[SingleIssuer, CoopTaskrun, TellTaskrun, SubmitAll],
        &[CoopTaskrun, TellTaskrun, SubmitAll],
        &[],
    ]
};
/// Completions are not deferred until somebody enters the ring: nobody would wake who waits for it
/// in another, then.
const WATCHED: [&[Flag]; 3] = {
    use Flag::{CoopTaskrun, SingleIssuer, SubmitAll, TellTaskrun};
    [
        &[SingleIssuer, CoopTaskrun, TellTaskrun, SubmitAll],
        &[CoopTaskrun, TellTaskrun, SubmitAll],
        &[],
    ]
};
/// The kernel's thread runs what others defer.
const WITH_THREAD: [&[Flag]; 2] =
    [&[Flag::Sqpoll, Flag::SingleIssuer, Flag::SubmitAll], &[Flag::Sqpoll]];

/// What a ring is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Setup flags in use, as in io_uring_setup(2).
    pub setup: Vec<&'static str>,
    /// Better ones that the kernel refused, and why.
    pub refused: Vec<(String, Errno)>,
    /// As in io_uring_setup(2), `IORING_FEAT_…`.
    pub features: Vec<&'static str>,
    /// Operations that are not everywhere, as in io_uring_enter(2).
    pub operations: Vec<&'static str>,
}

/// A ring, and what is known of it. Fails where the kernel has no such rings.
pub(super) fn build(kind: Kind) -> std::io::Result<(IoUring, Kernel)> {
    build_of(kind)
}

/// A ring of the entries that passthrough needs (Linux 5.19, `IORING_SETUP_SQE128` and `…_CQE32`).
pub(super) fn build_wide() -> std::io::Result<WideRing> {
    Ok(build_of(Kind::Wide)?.0)
}

fn build_of<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    kind: Kind,
) -> std::io::Result<(IoUring<S, C>, Kernel)> {
    let candidates: Vec<&[Flag]> = match kind {
        Kind::Interrupts | Kind::Polled => USUAL.to_vec(),
        Kind::Wide => WATCHED.to_vec(),
        Kind::Sqpoll => [&WITH_THREAD[..], &USUAL[..]].concat(),
    };
    let mut refused = Vec::new();
    let mut last_error = None;
    for flags in candidates {
        let polled = (kind == Kind::Polled).then_some(Flag::Iopoll);
        let flags: Vec<Flag> = flags.iter().copied().chain(polled).collect();
        let names = flags.iter().map(|flag| flag.name()).collect::<Vec<_>>();
        match setup(&flags) {
            Ok(ring) => {
                let ring: IoUring<S, C> = ring;
                check(&ring)?;
                let (features, operations) = (features(&ring), operations(&ring));
                return Ok((ring, Kernel { setup: names, refused, features, operations }));
            }
            Err(error) => {
                let errno = Errno(error.raw_os_error().unwrap_or(libc::EINVAL));
                refused.push((names.join(" "), errno));
                last_error = Some(error);
            }
        }
    }
    Err(last_error.expect("at least one was tried"))
}

fn setup<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    flags: &[Flag],
) -> std::io::Result<IoUring<S, C>> {
    let mut builder = IoUring::<S, C>::builder();
    builder.setup_cqsize(4 * ENTRIES);
    for flag in flags {
        match flag {
            Flag::SingleIssuer => builder.setup_single_issuer(),
            Flag::DeferTaskrun => builder.setup_defer_taskrun(),
            Flag::CoopTaskrun => builder.setup_coop_taskrun(),
            Flag::TellTaskrun => builder.setup_taskrun_flag(),
            Flag::SubmitAll => builder.setup_submit_all(),
            Flag::Sqpoll => builder.setup_sqpoll(THREAD_IDLE_MS),
            Flag::Iopoll => builder.setup_iopoll(),
        };
    }
    let ring = builder.build(ENTRIES)?;
    // Linux 5.15. The second number is of those that may wait for ever; 0 leaves it as it is.
    let _ = ring.submitter().register_iowq_max_workers(&mut [WORKERS, 0]);
    Ok(ring)
}

/// Without it there is no sleep that ends at a given moment.
fn check<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    ring: &IoUring<S, C>,
) -> std::io::Result<()> {
    if ring.params().is_feature_ext_arg() {
        return Ok(());
    }
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "it is older than Linux 5.11"))
}

/// What mends it where io_uring is missing.
pub fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "`sysctl kernel.io_uring_disabled=0`; in a container, use a seccomp profile that \
             allows io_uring_setup, io_uring_enter and io_uring_register"
        }
        Some(libc::ENOSYS) => {
            "use a kernel with CONFIG_IO_URING; in a container, use a seccomp profile that allows \
             io_uring_setup, io_uring_enter and io_uring_register"
        }
        Some(libc::ENOMEM) => "raise the limit of locked memory (`ulimit -l`, LimitMEMLOCK=)",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (`ulimit -n`)",
        _ => "use Linux 5.11 or newer; see /proc/sys/kernel/io_uring_disabled",
    }
}

fn features<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    ring: &IoUring<S, C>,
) -> Vec<&'static str> {
    let has = ring.params();
    let all = [
        ("NODROP", has.is_feature_nodrop()),
        ("SUBMIT_STABLE", has.is_feature_submit_stable()),
        ("FAST_POLL", has.is_feature_fast_poll()),
        ("EXT_ARG", has.is_feature_ext_arg()),
        ("NATIVE_WORKERS", has.is_feature_native_workers()),
        ("RSRC_TAGS", has.is_feature_resource_tagging()),
        ("CQE_SKIP", has.is_feature_skip_cqe_on_success()),
        ("LINKED_FILE", has.is_feature_linked_file()),
        ("MIN_TIMEOUT", has.is_feature_min_timeout()),
        ("NO_IOWAIT", has.is_feature_no_iowait()),
    ];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// None where the kernel is not allowed to say.
fn operations<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    ring: &IoUring<S, C>,
) -> Vec<&'static str> {
    let mut probe = Probe::new();
    if ring.submitter().register_probe(&mut probe).is_err() {
        return Vec::new();
    }
    let all = [
        ("READ_FIXED", opcode::ReadFixed::CODE),
        ("WRITE_FIXED", opcode::WriteFixed::CODE),
        ("READ", opcode::Read::CODE),
        ("WRITE", opcode::Write::CODE),
        ("FALLOCATE", opcode::Fallocate::CODE),
        ("URING_CMD", opcode::UringCmd80::CODE),
    ];
    all.into_iter().filter(|(_, code)| probe.is_supported(*code)).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    //! Goal: a ring is made of what the kernel takes, and what is missing is told with its fix.
    //! Method: every set of flags by itself on this kernel, and errors made up.

    use super::*;

    #[test]
    fn every_candidate_is_one_that_some_kernel_takes() {
        // This one takes all of them, or the first by which it can be told apart.
        for flags in USUAL.iter().chain(&WITH_THREAD) {
            match setup::<squeue::Entry, cqueue::Entry>(flags) {
                Ok(ring) => {
                    assert!(check(&ring).is_ok());
                    assert_eq!(ring.params().is_setup_sqpoll(), flags.contains(&Flag::Sqpoll));
                }
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{flags:?}"),
            }
        }
        // Of no use to any kernel: a thread defers nothing.
        let useless = [Flag::Sqpoll, Flag::DeferTaskrun, Flag::SingleIssuer];
        assert!(setup::<squeue::Entry, cqueue::Entry>(&useless).is_err());
    }

    #[test]
    fn the_best_that_there_is() {
        let (ring, kernel) = build(Kind::Interrupts).unwrap();
        let is_taken = |flags: &&[Flag]| setup::<squeue::Entry, cqueue::Entry>(flags).is_ok();
        let first = USUAL.iter().position(is_taken).unwrap();
        assert_eq!(kernel.refused.len(), first);
        assert_eq!(kernel.setup.len(), USUAL[first].len());
        assert!(kernel.features.contains(&"EXT_ARG") && !ring.params().is_setup_iopoll());
        assert!(kernel.operations.contains(&"READ_FIXED"), "{:?}", kernel.operations);
        let (ring, kernel) = build(Kind::Polled).unwrap();
        assert!(kernel.setup.contains(&"IOPOLL") && ring.params().is_setup_iopoll());
    }

    #[test]
    fn what_is_missing_is_told_with_its_fix() {
        let of = |errno| remedy(&std::io::Error::from_raw_os_error(errno));
        assert!(of(libc::EPERM).contains("io_uring_disabled=0") && of(libc::EPERM).contains("sec"));
        assert!(of(libc::ENOSYS).contains("CONFIG_IO_URING"));
        assert!(of(libc::ENOMEM).contains("LimitMEMLOCK"));
        let old = std::io::Error::new(std::io::ErrorKind::Unsupported, "it is old");
        assert!(remedy(&old).contains("Linux 5.11"));
    }
}
