//! The Unix socket of an export: who may connect, and the thread that serves one front end after
//! the other.
//!
//! The thread waits for a front end, for a message, or for the reactor. `Ends::stop` ends the
//! first two by shutting the sockets down, `Ends::hand_over` by saying so, but for a message that
//! has begun: that `Ends::disconnect` ends; the third ends when the reactor replies.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};
use vhost::vhost_user::message::{BackendReq, FrontendReq};
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut};

use crate::disk::Trouble;
use crate::export::Usage;
use crate::handed::{FrontEnd, Told};
use crate::line::{Gone, Lines};
use crate::unix_socket::SocketFile;
use crate::vhost::config::Facts;
use crate::vhost::device::Device;
use crate::vhost::fault::Fault;
use crate::vhost::graveyard::Retired;
use crate::vhost::memory::replace;
use crate::vhost::peek::{LogBell, LooseTable, Peeked, VERSION_1, message, peek, reply};
use crate::vhost::session::Session;
use crate::vhost::sigbus::Alarm;

/// Front ends that may wait while one is being served.
pub(crate) const BACKLOG: i32 = 4;
/// Wait after a failed `accept`: it fails again at once while file descriptors are short.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What the export's owner and its thread both hold: the ends by which to reach the other side.
pub(crate) struct Ends {
    /// Its name.
    export: String,
    listener: UnixListener,
    file: Arc<SocketFile>,
    /// Readable once the thread shall leave all as it is.
    leave: OwnedFd,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    stopping: bool,
    front_end: Option<UnixStream>,
    /// For messages from us to the front end. Closing it makes QEMU complain.
    channel: Option<OwnedFd>,
    /// By the front end's last message; `None`: nobody is connected.
    usage: Option<Usage>,
}

impl Ends {
    pub(crate) fn new(
        export: String,
        (listener, file): (UnixListener, SocketFile),
    ) -> Result<Arc<Ends>, std::io::Error> {
        let leave = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let leave = leave.inspect_err(|_| file.remove())?;
        let file = Arc::new(file);
        Ok(Arc::new(Ends { export, listener, file, leave, open: Mutex::default() }))
    }

    pub(crate) fn file(&self) -> &Arc<SocketFile> {
        &self.file
    }

    /// Ends the thread between two messages, and closes nothing.
    pub(crate) fn hand_over(&self) {
        // The first number that is written always fits.
        let _ = rustix::io::write(&self.leave, &1u64.to_ne_bytes());
    }

    /// What the next process needs of this.
    pub(crate) fn handed(&self) -> std::io::Result<(OwnedFd, Option<OwnedFd>)> {
        let channel = self.open().channel.take();
        Ok((self.listener.try_clone()?.into(), channel))
    }

    /// Waits until there is something for the thread; false if it shall leave.
    fn wait(&self, on: &impl AsFd) -> Result<bool, Errno> {
        self.wait_for(on, PollFlags::IN)
    }

    /// The same, of a front end that may lose its memory meanwhile.
    fn wait_for_message(&self, stream: &UnixStream, alarm: &Alarm) -> Result<bool, String> {
        let mut fds = [stream.as_fd(), alarm.as_fd(), self.leave.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        rustix::io::retry_on_intr(|| poll(&mut fds, None)).map_err(|error| error.to_string())?;
        if alarm.has_rung() {
            return Err(Fault::MemoryLost.to_string());
        }
        Ok(fds[2].revents().is_empty())
    }

    /// The same; an end of `on` is always waited for.
    fn wait_for(&self, on: &impl AsFd, events: PollFlags) -> Result<bool, Errno> {
        let mut fds = [PollFd::new(on, events), PollFd::new(&self.leave, PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        Ok(fds[1].revents().is_empty())
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // Each change is one assignment, so a panic elsewhere leaves nothing half done.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the thread, which closes what is open.
    pub(crate) fn stop(&self) {
        self.open().stopping = true;
        self.disconnect();
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
    }

    /// Ends the wait for a front end that has begun a message, or does not read its replies.
    pub(crate) fn disconnect(&self) {
        if let Some(front_end) = &self.open().front_end {
            let _ = front_end.shutdown(std::net::Shutdown::Both);
        }
    }

    /// By the front end's last message; `None`: nobody is connected.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.open().usage
    }

    fn note_usage(&self, session: &Mutex<Session>) {
        let usage = locked(session).usage();
        self.open().usage = Some(usage);
    }

    fn is_stopping(&self) -> bool {
        self.open().stopping
    }

    /// Waits for a front end; `None` if the thread shall leave.
    fn accept(&self) -> std::io::Result<Option<UnixStream>> {
        if !self.wait(&self.listener)? {
            return Ok(None);
        }
        let (stream, _) = self.listener.accept()?;
        self.remember(&stream)?;
        Ok(Some(stream))
    }

    /// So that it can be shut down.
    fn remember(&self, stream: &UnixStream) -> std::io::Result<()> {
        let copy = stream.try_clone()?;
        self.open().front_end = Some(copy);
        Ok(())
    }

    fn dismiss(&self) {
        let mut open = self.open();
        (open.front_end, open.channel, open.usage) = (None, None, None);
    }

    /// Tells the front end to read the configuration space again.
    pub(crate) fn announce_config(&self) {
        let message = message(BackendReq::CONFIG_CHANGE_MSG.into(), VERSION_1, 0);
        if let Some(channel) = &self.open().channel {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // A front end that does not read its channel learns of the size at its next start.
            let _ = rustix::net::send(channel, &message, flags);
        }
    }
}

/// What the thread leaves to the next process: a front end, and what it has said.
pub(crate) struct Left {
    pub(crate) stream: UnixStream,
    pub(crate) told: Told<OwnedFd>,
    /// The guest's choice, where no device keeps it.
    pub(crate) write_back: bool,
}

/// What a front end has said to the process before.
struct Before {
    channel: Option<OwnedFd>,
    write_back: bool,
    told: Told<OwnedFd>,
}

/// The body of an export's thread. `first`: a front end of the process before. Returns the one that
/// is there when the thread was asked to leave.
pub(crate) fn serve(
    ends: &Ends,
    lines: &Lines<Device>,
    (facts, since): (Facts, u64),
    retired: &Receiver<Retired>,
    first: Option<FrontEnd<OwnedFd>>,
) -> Option<Left> {
    let mut first = first;
    loop {
        let stream = match first.take() {
            Some(FrontEnd { stream, channel, write_back, told }) => {
                let stream = UnixStream::from(stream);
                let remembered = ends.remember(&stream);
                remembered.map(|()| Some((stream, Some(Before { channel, write_back, told }))))
            }
            None => ends.accept().map(|stream| stream.map(|stream| (stream, None))),
        };
        // Looked at after the front end is known to `stop`, so that one of the two sees the other.
        if ends.is_stopping() {
            return None;
        }
        let (stream, before) = match stream {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return None,
            Err(error) => {
                tracing::warn!(export = ends.export, %error, "a front end could not be accepted");
                #[expect(clippy::disallowed_methods, reason = "this thread is not a reactor's")]
                std::thread::sleep(ACCEPT_AGAIN);
                continue;
            }
        };
        let Ok(alarm) = Alarm::new() else {
            let export = &ends.export;
            tracing::warn!(export, "a front end could not be accepted: no file can be opened");
            ends.dismiss();
            continue;
        };
        let session = Session::new(lines.clone(), facts, since, alarm.clone());
        let served = serve_one(ends, lines, session, (stream, &alarm), before, retired);
        match served {
            Ok(Some(left)) => return Some(left),
            Ok(None) => ends.dismiss(),
            Err(Gone) => return None,
        }
    }
}

/// How a front end's service ended.
enum Ended {
    ByIt,
    /// All stays as it is.
    Left,
}

/// Serves one front end until it leaves, or the thread shall.
fn serve_one(
    ends: &Ends,
    lines: &Lines<Device>,
    session: Session,
    (stream, alarm): (UnixStream, &Alarm),
    before: Option<Before>,
    retired: &Receiver<Retired>,
) -> Result<Option<Left>, Gone> {
    let session = Arc::new(Mutex::new(session));
    lines.ask_all(|device| device.connect())?;
    let ended = match handler(ends, lines, &stream, &session, before) {
        Ok(handler) => converse(ends, (&stream, alarm), handler, &session, retired),
        Err(error) => Err(error),
    };
    if let Ok(Ended::Left) = ended {
        let mut session = locked(&session);
        let write_back = session.write_back();
        return match session.take_told() {
            Ok(told) => Ok(Some(Left { stream, told, write_back })),
            Err(_) => Err(Gone),
        };
    }
    if let Err(reason) = ended
        && !ends.is_stopping()
    {
        tracing::warn!(export = ends.export, reason, "a front end was disconnected");
        if let Some(line) = lines.all().first() {
            let _ = line.ask(|device| device.note(Trouble::Initiator(reason)));
        }
    }
    let left = leave(ends, lines);
    drop_all(retired);
    left.map(|()| None)
}

type Handler = BackendReqHandler<Mutex<Session>>;

/// Who takes messages apart. For a front end of the process before it has to learn what was
/// negotiated, and the devices all that was said.
fn handler(
    ends: &Ends,
    lines: &Lines<Device>,
    stream: &UnixStream,
    session: &Arc<Mutex<Session>>,
    before: Option<Before>,
) -> Result<Handler, String> {
    let text = |error: std::io::Error| error.to_string();
    let Some(Before { channel, write_back, told }) = before else {
        let stream = stream.try_clone().map_err(text)?;
        return Ok(BackendReqHandler::from_stream(stream, session.clone()));
    };
    ends.open().channel = channel;
    let handler = negotiated(stream, session, told.features, told.protocol)?;
    lines.ask_all(move |device| device.set_write_back(write_back)).map_err(|e| e.to_string())?;
    let mut session = locked(session);
    session.set_write_back(write_back);
    session.tell_again(told).map_err(|error| error.to_string())?;
    Ok(handler)
}

/// The protocol crate learns what was negotiated by messages only: so it gets them, through a
/// socket that is exchanged for the front end's afterwards.
fn negotiated(
    stream: &UnixStream,
    session: &Arc<Mutex<Session>>,
    features: u64,
    protocol: u64,
) -> Result<Handler, String> {
    let text = |error: std::io::Error| error.to_string();
    let (mut ours, its) = UnixStream::pair().map_err(text)?;
    let mut handler = BackendReqHandler::from_stream(its, session.clone());
    for (request, value) in [
        (FrontendReq::GET_FEATURES, None),
        (FrontendReq::SET_FEATURES, Some(features)),
        (FrontendReq::GET_PROTOCOL_FEATURES, None),
        (FrontendReq::SET_PROTOCOL_FEATURES, Some(protocol)),
    ] {
        let value = value.map(u64::to_ne_bytes);
        let body = value.as_ref().map_or(&[][..], |bytes| bytes);
        let len = if value.is_some() { 8 } else { 0 };
        ours.write_all(&message(request.into(), VERSION_1, len)).map_err(text)?;
        ours.write_all(body).map_err(text)?;
        handler.handle_request().map_err(|error| error.to_string())?;
    }
    replace(handler.as_raw_fd(), stream).map_err(|error| error.to_string())?;
    Ok(handler)
}

/// Returns once nothing of the front end is under way any more, however long it takes: the next one
/// may not come before.
fn leave(ends: &Ends, lines: &Lines<Device>) -> Result<(), Gone> {
    // One that does not say so is not at rest; all are told nevertheless.
    let orderly =
        lines.ask_all(|device| device.is_at_rest()).is_ok_and(|its| !its.contains(&false));
    let leave = move |device: std::rc::Rc<Device>| async move { device.disconnect(orderly).await };
    let patient = || !ends.is_stopping();
    lines.ask_all_and_wait_while(leave, patient).map(|_| ())
}

/// Gives back what the reactors do not need any more.
fn drop_all(retired: &Receiver<Retired>) {
    retired.try_iter().for_each(drop);
}

fn locked(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn converse(
    ends: &Ends,
    (stream, alarm): (&UnixStream, &Alarm),
    mut handler: Handler,
    session: &Arc<Mutex<Session>>,
    retired: &Receiver<Retired>,
) -> Result<Ended, String> {
    let text = |error: Errno| error.to_string();
    loop {
        // After each message, whoever took it: a front end could fill the process's places for
        // mappings, and its table of files, with what was replaced.
        drop_all(retired);
        ends.note_usage(session);
        if !ends.wait_for_message(stream, alarm)? {
            return Ok(Ended::Left);
        }
        match peek(stream) {
            Ok(Peeked::End) | Err(Errno::CONNRESET) => return Ok(Ended::ByIt),
            Ok(Peeked::Ordinary) => {}
            Ok(Peeked::StopRing) if locked(session).is_owing() => {
                // It stays where it is until somebody serves the ring, and takes it then.
                let left = !ends.wait_for(stream, PollFlags::empty()).map_err(text)?;
                return Ok(if left { Ended::Left } else { Ended::ByIt });
            }
            Ok(Peeked::StopRing) => {}
            Ok(Peeked::Channel(channel)) => ends.open().channel = Some(channel),
            Ok(Peeked::LooseTable) => {
                take_loose_table(stream, session).map_err(|error| error.to_string())?;
                continue;
            }
            Ok(Peeked::LogBell) => {
                take_log_bell(stream, session).map_err(|error| error.to_string())?;
                continue;
            }
            Err(error) => return Err(error.to_string()),
        }
        match handler.handle_request() {
            Ok(()) => {}
            Err(Error::Disconnected) => return Ok(Ended::ByIt),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn take_loose_table(stream: &UnixStream, session: &Mutex<Session>) -> Result<(), Error> {
    let table = LooseTable::receive(stream).map_err(Error::SocketError)?;
    let mut session = locked(session);
    let taken = session.set_mem_table(&table.regions, table.files, None);
    if table.wants_reply && session.acknowledges() {
        reply(stream, FrontendReq::SET_MEM_TABLE, taken.is_ok()).map_err(Error::SocketError)?;
    }
    taken.map(|_| ())
}

fn take_log_bell(stream: &UnixStream, session: &Mutex<Session>) -> Result<(), Error> {
    let bell = LogBell::receive(stream).map_err(Error::SocketError)?;
    let mut session = locked(session);
    let taken = session.set_log_bell(bell.file);
    if bell.wants_reply && session.acknowledges() {
        reply(stream, FrontendReq::SET_LOG_FD, taken.is_ok()).map_err(Error::SocketError)?;
    }
    taken
}
