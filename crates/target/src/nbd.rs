//! NBD: a volume as a network block device, for this host and for others (the protocol document of
//! the NetworkBlockDevice project, doc/proto.md).
//!
//! A thread for each listener takes clients in ([`listener`]); all else is done by reactors: the
//! one that has the volume, and others to which it is offered, each for some of the connections.
//!
//! ```text
//! client ── socket ── listener ═ letters ═ post ── connection ── haggle
//!                                           │         ├ inbox ── request
//!                                           │         └ workers ── reply
//!                                           └ disk ── volume
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.
//!
//! Spoken: fixed newstyle with EXPORT_NAME, GO, INFO and LIST; structured replies; block status of
//! `base:allocation` (everything counts as allocated); FUA, flush, trim, write zeroes, cache,
//! several connections. Not here yet: TLS, extended headers. A client sees a new size when it
//! connects again.

mod wire;
mod request;
mod haggle;
mod inbox;
mod workers;
mod lane;
mod reply;
mod connection;
mod post;
mod listener;

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

use crate::disk::{Disk, PARTS_MAX, SERIAL_BYTES};
use crate::export::{Export, ExportError, ExportStatus, Part, Place, check_count};
use crate::limits::RateLimits;
use crate::line::{Line, Lines};
use crate::nbd::listener::{BACKLOG, Listener};
use crate::nbd::post::Post;
use crate::unix_socket::{self, Access};

/// How a volume shall be offered; by one way at least.
#[derive(Clone, Debug)]
pub struct NbdSpec {
    /// By which clients may ask for it; the empty name will do, too.
    pub name: String,
    pub socket: Option<PathBuf>,
    pub access: Access,
    /// Port 0: any that is free.
    pub listen: Option<SocketAddr>,
    pub limits: Arc<RateLimits>,
}

/// One volume for any number of clients.
pub struct NbdExport {
    spec: NbdSpec,
    lines: Lines<Post>,
    stopping: Arc<AtomicBool>,
    listeners: Vec<(Arc<Listener>, JoinHandle<()>)>,
}

impl NbdExport {
    /// Listens on the socket (a stale socket file is replaced) and at the address, and
    /// serves whoever comes. The parts, at least one, share the connections; the first is that of
    /// the reactor which has the volume.
    pub fn start(parts: Vec<Part>, spec: NbdSpec) -> Result<NbdExport, ExportError> {
        let count = check(&spec, parts.len())?;
        let mut listeners = Vec::new();
        if let Some(address) = spec.listen {
            let listener = TcpListener::bind(address)
                .map_err(|error| ExportError::Address { address, error })?;
            listeners.push(Listener::Tcp(listener));
        }
        // Last, since it leaves something behind.
        if let Some(path) = &spec.socket {
            let (listener, file) =
                unix_socket::bind(path, BACKLOG, spec.access).map_err(|error| error.of(path))?;
            listeners.push(Listener::Unix(listener, Arc::new(file)));
        }
        let remove = |_: &ExportError| listeners.iter().for_each(Listener::remove_file);
        let lines = start_posts(parts, count, &spec).inspect_err(remove)?;
        let mut export = NbdExport { spec, lines, stopping: Arc::default(), listeners: Vec::new() };
        // An export that is dropped takes back what was begun; first what leaves something behind.
        for listener in listeners.into_iter().rev() {
            export.serve(listener)?;
        }
        Ok(export)
    }

    fn serve(&mut self, listener: Listener) -> Result<(), ExportError> {
        let listener = Arc::new(listener);
        let (its, lines, stopping) = (listener.clone(), self.lines.clone(), self.stopping.clone());
        let body = move || its.serve(&stopping, &lines);
        let thread = std::thread::Builder::new().name("nbd".into()).spawn(body);
        let thread = thread.inspect_err(|_| listener.remove_file());
        self.listeners.push((listener, thread.map_err(ExportError::Thread)?));
        Ok(())
    }

    /// Where it listens for TCP, with the port that was found.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listeners.iter().find_map(|(listener, _)| match &**listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(..) => None,
        })
    }
}

impl Export for NbdExport {
    fn status(&self) -> Option<ExportStatus> {
        Some(ExportStatus::of(self.lines.ask_all(Post::status).ok()?))
    }

    /// Who has an address to come to needs no socket.
    fn place(&self) -> Option<Arc<dyn Place>> {
        let mut sockets = self.listeners.iter().filter_map(|(listener, _)| listener.file());
        let file = sockets.next().filter(|_| self.spec.listen.is_none())?;
        Some(file.clone())
    }

    /// The protocol has no way to tell: clients see it when they connect again. Requests beyond
    /// the old end are served from now on.
    fn resized(&self) {
        let looked = self.lines.ask_all_and_wait(|post| async move { post.look().await });
        if looked.is_err() {
            tracing::warn!(export = self.spec.name, "its reactor does not say how large it is");
        }
    }
}

impl Drop for NbdExport {
    fn drop(&mut self) {
        for (listener, _) in &self.listeners {
            listener.stop(&self.stopping);
            listener.remove_file();
        }
        let close = |post: Rc<Post>| async move { post.close().await };
        if self.lines.ask_all_and_wait(close).is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        for (_, thread) in self.listeners.drain(..) {
            let _ = thread.join();
        }
        self.lines.withdraw();
    }
}

fn check(spec: &NbdSpec, parts: usize) -> Result<u16, ExportError> {
    let count = check_count(parts, PARTS_MAX, "reactors")?;
    if spec.socket.is_none() && spec.listen.is_none() {
        let message = "it listens nowhere; name a socket or an address".to_owned();
        return Err(ExportError::Spec(message));
    }
    Ok(count)
}

/// `count`: how many parts there are.
fn start_posts(parts: Vec<Part>, count: u16, spec: &NbdSpec) -> Result<Lines<Post>, ExportError> {
    Lines::open(parts.into_iter().map(|Part { core, volume }| {
        let (name, limits) = (spec.name.clone(), spec.limits.clone());
        Line::open(core, move |reactor| {
            let volume = reactor.get(volume)?;
            // No client of NBD asks for a serial number.
            Some(Post::new(Disk::new(reactor, name, volume, [0; SERIAL_BYTES], count, limits)))
        })
    }))
}
