//! From one process to the one that takes its place, under the same process id: exports with their
//! sockets, by `exec`.
//!
//! ```text
//! old   a socket pair; into one end: a memfd that describes, then all other files; the other end
//!       becomes the standard input of the new program
//! new   takes files until there are no more; the description says how many there are, and names
//!       them by number
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ashlar_target::handed::Handed;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

use crate::refusal::{Answer, Refusal};

/// Of the description. Another one is not understood, and said to be so before anything is stopped.
pub const FORMAT: u32 = 2;
/// Begins what a program says that would take over.
pub const CONSENT: &str = "takes over: ashlar ";
/// Says to a new process that someone hands over to it.
pub const OPTION: &str = "--handed-over";
/// This program, whatever has become of its file.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// Files in one message; the kernel takes 253.
const FILES_MAX: usize = 128;

/// What a process hands over.
pub struct Handover {
    /// Since when guests wait, by the monotonic clock.
    pub began: Duration,
    /// How often this was done since the first process started.
    pub count: u32,
    /// Why the program that was wanted did not take over.
    pub error: Option<String>,
    pub exports: BTreeMap<String, Handed<OwnedFd>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    format: u32,
    began_ns: u64,
    count: u32,
    error: Option<String>,
    /// How many there are besides the description.
    files: usize,
    exports: BTreeMap<String, Handed<usize>>,
}

/// The monotonic clock, which goes on over an `exec`.
pub fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Lets another program take the place of this one; if that cannot be, this program begins anew and
/// says why. Returns only if not even that can be.
pub fn hand_over(binary: &Path, mut handover: Handover) -> io::Error {
    handover.count += 1;
    let (mut described, files) = describe(handover);
    let refused = match run(binary, &described, &files) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let error = format!("{} did not take over: {refused}", binary.display());
    tracing::error!("{error}; this program goes on");
    described.error = Some(error);
    match run(Path::new(OWN_PROGRAM), &described, &files) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn describe(handover: Handover) -> (Described, Vec<OwnedFd>) {
    let Handover { began, count, error, exports } = handover;
    let mut files = Vec::new();
    let mut number = |file| {
        files.push(file);
        Some(files.len() - 1)
    };
    let name =
        |(name, handed): (String, Handed<OwnedFd>)| Some((name, handed.rename(&mut number)?));
    let exports = exports.into_iter().filter_map(name).collect();
    let began_ns = u64::try_from(began.as_nanos()).unwrap_or(u64::MAX);
    let described =
        Described { format: FORMAT, began_ns, count, error, files: files.len(), exports };
    (described, files)
}

/// The words of this process's command line, and that someone hands over.
pub fn arguments() -> Vec<OsString> {
    let own = std::env::args_os().skip(1).filter(|word| word != OPTION);
    own.chain([OPTION.into()]).collect()
}

fn run(
    program: &Path,
    described: &Described,
    files: &[OwnedFd],
) -> io::Result<std::convert::Infallible> {
    let input = send(described, files)?;
    if let Err(error) = keep_files_here() {
        tracing::warn!("files may stay open in the next program: {error}");
    }
    Err(Command::new(program).args(arguments()).stdin(Stdio::from(input)).exec())
}

/// All files end with this program, but the three standard ones: what the protocol crate receives
/// would stay open in the next one, and with it the memory of guests that are gone.
fn keep_files_here() -> io::Result<()> {
    // SAFETY: this changes a flag of files, which no memory depends on.
    let done = unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The end of a socket from which all comes.
fn send(described: &Described, files: &[OwnedFd]) -> io::Result<OwnedFd> {
    let mut text = std::fs::File::from(memfd_create("ashlar-handover", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(&text, described)?;
    text.flush()?;
    let (into, out) = std::os::unix::net::UnixStream::pair()?;
    let files: Vec<BorrowedFd<'_>> =
        std::iter::once(text.as_fd()).chain(files.iter().map(AsFd::as_fd)).collect();
    for some in files.chunks(FILES_MAX) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(some));
        // Not waiting: nobody reads yet.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::sendmsg(&into, &[IoSlice::new(&[0])], &mut ancillary, flags)?;
    }
    Ok(out.into())
}

/// Takes what the process before handed over.
pub fn receive() -> Answer<Handover> {
    let failed = |error: io::Error| {
        Refusal::failed(format!("nothing was handed over on the standard input: {error}"))
            .fix(format!("leave {OPTION} out: it is for `ashlar upgrade` only"))
    };
    let input = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let mut files = receive_files(&input).map_err(failed)?.into_iter().map(Some);
    let described = files.next().flatten();
    let described = described.ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
    let described = read(described.into()).map_err(failed)?;
    if described.format != FORMAT {
        let format = described.format;
        return Err(Refusal::failed(format!("what was handed over has format {format}")));
    }
    let mut files: Vec<Option<OwnedFd>> = files.collect();
    if files.len() != described.files {
        // Numbers may name others now: a guest's memory would be that of another.
        let text = format!("{} of {} files were handed over", files.len(), described.files);
        return Err(Refusal::failed(text).fix("start the daemon again; see its limit of files"));
    }
    let mut file = |number: usize| files.get_mut(number).and_then(Option::take);
    let mut exports = BTreeMap::new();
    for (name, handed) in described.exports {
        match handed.rename(&mut file) {
            Some(handed) => _ = exports.insert(name, handed),
            None => tracing::error!(export = name, "a file of it was not handed over"),
        }
    }
    let began = Duration::from_nanos(described.began_ns);
    Ok(Handover { began, count: described.count, error: described.error, exports })
}

fn read(mut file: std::fs::File) -> io::Result<Described> {
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

fn receive_files(input: &OwnedFd) -> io::Result<Vec<OwnedFd>> {
    let mut files = Vec::new();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(input, &mut into, &mut ancillary, flags)?;
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other("some files were lost: too many are open"));
        }
        if received.bytes == 0 {
            return Ok(files);
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                files.extend(some);
            }
        }
    }
}
