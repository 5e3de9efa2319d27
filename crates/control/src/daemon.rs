//! `ashlar serve`: reactors, the host, the API, signals.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::cores::{Core, CoreError};
use ashlar_reactor::uring;
use ashlar_target::unix_socket::SocketFile;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use crate::catalog::StateDirectory;
use crate::handover::{self, FORMAT, Handover};
use crate::host::on_demand::Followers;
use crate::host::{Host, Seen, UNUSED_INTERVAL, WATCH_INTERVAL, witness};
use crate::log;
use crate::refusal::{Answer, Refusal};
use crate::topology::parse_cpus;
use crate::{connections, machine, server, socket};

/// Most reactors; one per CPU is all that makes sense.
const CPUS_MAX: usize = 256;
/// How long clients may take to read their last answers.
const GOODBYE: Duration = Duration::from_secs(1);

/// CPUs for reactors, as in `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let cpus = parse_cpus(text).filter(|cpus| cpus.len() <= CPUS_MAX);
        let cpus = cpus.ok_or_else(|| format!("{text:?} is no list of CPUs; write 0 or 0,2-3"))?;
        Ok(CpuList(cpus.into_iter().collect()))
    }
}

/// What the daemon was told at its start.
pub struct Settings {
    pub state: PathBuf,
    pub socket: PathBuf,
    /// `None`: one reactor, on the first CPU that this process may use.
    pub cores: Option<CpuList>,
    pub poll_window: Duration,
    pub io_uring: uring::Settings,
    /// Who this host is to others that reach its drives. `None`: it knows itself.
    pub host_id: Option<Uuid>,
    /// Another process hands over to this one.
    pub handed_over: bool,
}

/// Whether this program would take over from one that uses this format and this directory.
pub fn check_handover(format: u32, state: &Path) -> Answer<()> {
    if format != FORMAT {
        return Err(Refusal::failed(format!(
            "it takes over in format {FORMAT}, and the running one hands over in {format}"
        )));
    }
    StateDirectory::read(state).map(|_| ())
}

/// Serves until it is told to stop.
pub async fn serve(settings: Settings) -> Answer<()> {
    raise_descriptor_limit();
    let mut handover = settings.handed_over.then(handover::receive).transpose()?;
    let directory = StateDirectory::open(&settings.state)?;
    let path = std::path::absolute(&settings.socket)
        .map_err(|error| Refusal::invalid(format!("the socket's path: {error}")))?;
    let mut signals = Signals::catch()?;
    let names = machine::host(settings.host_id, &directory)?;
    let listener = listen(&path)?;
    let file = SocketFile::of(&path);
    let exports_directory = path.parent().unwrap_or(Path::new("/")).join("export");
    let cores = start_cores(&settings).inspect_err(|_| file.remove())?;
    let (tell, told) = mpsc::unbounded_channel();
    let host = Arc::new(Host::new(cores, directory, exports_directory, names, tell));
    tokio::spawn(witness::hear(host.clone(), told));
    if let Some(handover) = &mut handover {
        host.accept_handover(std::mem::take(&mut handover.exports));
    }
    let restored = tokio::select! {
        // First, so that what is stored was loaded before.
        biased;
        restored = host.restore() => restored.map(|()| true),
        // What has been started already is put to rest.
        () = signals.first() => shut_down(&host, &mut signals).await.map(|()| false),
    };
    if restored != Ok(true) {
        file.remove();
        std::mem::forget(host);
        return restored.map(|_| ());
    }
    if let Some(handover) = &handover {
        host.taken_over(handover);
    }
    let (tell_server, stop_server) = watch::channel(());
    let router = server::router(host.clone());
    let server = tokio::spawn(connections::serve(listener, router, stop_server));
    let watcher = tokio::spawn(keep_watch(host.clone()));
    // Not aborted: they end by themselves when the host stops, and not in the middle of a change.
    tokio::spawn(follow_guests(host.clone()));
    tokio::spawn(open_exports(host.clone()));
    tokio::spawn(end_unused_connections(host.clone()));
    tracing::info!(socket = %path.display(), state = %settings.state.display(), "serving");
    tell_supervisor("READY=1");
    let wanted = tokio::select! {
        () = signals.first() => None,
        binary = host.upgrade_wanted() => Some(binary),
    };
    if let Some(binary) = wanted {
        watcher.abort();
        file.remove();
        drop(tell_server);
        let _ = tokio::time::timeout(GOODBYE, server).await;
        return upgrade(&host, &binary, &mut signals).await;
    }
    let down = shut_down(&host, &mut signals).await;
    watcher.abort();
    file.remove();
    drop(tell_server);
    let _ = tokio::time::timeout(GOODBYE, server).await;
    tracing::info!("stopped");
    // A reactor whose drive hangs would keep us from ending; all that matters is on drives now.
    std::mem::forget(host);
    down
}

/// Another program goes on from here, with this process's id. Returns what kept it from that, or
/// once all is at rest, if it was told to end meanwhile.
async fn upgrade(host: &Host, binary: &Path, signals: &mut Signals) -> Answer<()> {
    let (began, count) = (handover::now(), host.upgrades().count);
    let mut at_rest = std::pin::pin!(host.hand_over());
    let exports = tokio::select! {
        exports = &mut at_rest => exports,
        () = signals.first() => {
            tracing::info!("stopping instead; a second signal ends at once");
            tell_supervisor("STOPPING=1");
            tokio::select! {
                _ = at_rest => return Ok(()),
                () = signals.first() => end_at_once(),
            }
        }
    };
    let error = handover::hand_over(binary, Handover { began, count, error: None, exports });
    let refusal = Refusal::failed(format!("no program took over: {error}"));
    Err(refusal.fix("start the daemon again"))
}

async fn shut_down(host: &Host, signals: &mut Signals) -> Answer<()> {
    tracing::info!("stopping: exports are drained, arrays flushed; a second signal ends at once");
    tell_supervisor("STOPPING=1");
    tokio::select! {
        down = host.shut_down() => down,
        () = signals.first() => end_at_once(),
    }
}

fn end_at_once() -> ! {
    tracing::error!("ended at once");
    std::process::exit(1);
}

/// The soft limit is meant for programs that cannot use more; each guest takes some 50.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

async fn keep_watch(host: Arc<Host>) {
    let mut seen = Seen::default();
    let mut ticks = tokio::time::interval(WATCH_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        log::tell_left_out();
        host.watch(&mut seen).await;
    }
}

/// Apart from the watch, which may be long in coming back.
async fn end_unused_connections(host: Arc<Host>) {
    loop {
        host.end_unused_connections();
        tokio::time::sleep(UNUSED_INTERVAL).await;
    }
}

async fn open_exports(host: Arc<Host>) {
    loop {
        host.try_down_exports().await;
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

async fn follow_guests(host: Arc<Host>) {
    let mut followers = Followers::default();
    loop {
        host.follow_guests(&mut followers);
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// For systemd units of `Type=notify`; without such a supervisor there is nobody to tell.
fn tell_supervisor(news: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let told = supervisor(&socket)
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(news.as_bytes(), &address));
    if let Err(error) = told {
        tracing::warn!("the supervisor at NOTIFY_SOCKET cannot be told: {error}");
    }
}

/// A path, or `@` and an abstract name.
fn supervisor(socket: &OsStr) -> std::io::Result<SocketAddr> {
    match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(socket),
    }
}

fn start_cores(settings: &Settings) -> Answer<Vec<Core>> {
    let cpus = match &settings.cores {
        Some(CpuList(cpus)) => cpus.clone(),
        None => vec![first_cpu()],
    };
    let start = |cpu: &usize| {
        Core::start_with(*cpu, settings.poll_window, settings.io_uring).map_err(not_started)
    };
    cpus.iter().map(start).collect()
}

fn not_started(error: CoreError) -> Refusal {
    match error {
        CoreError::Uring(error) => Refusal::failed(format!("io_uring cannot be used: {error}"))
            .fix(uring::probe::remedy(&error)),
        CoreError::Pin { .. } | CoreError::Thread(_) => {
            Refusal::failed(error.to_string()).fix("see --cores")
        }
    }
}

/// The first CPU that this process may run on.
fn first_cpu() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None).ok();
    let mut cpus = 0..rustix::thread::CpuSet::MAX_CPU;
    allowed.and_then(|set| cpus.find(|cpu| set.is_set(*cpu))).unwrap_or(0)
}

/// The API's socket: for the daemon's user only, from its first moment.
fn listen(path: &Path) -> Answer<UnixListener> {
    socket::make_way(path)?;
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(mask);
    listener.map_err(|error| {
        Refusal::failed(format!("{} cannot be listened on: {error}", path.display()))
            .fix("name another --socket")
    })
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn catch() -> Answer<Signals> {
        let catch =
            |kind| signal(kind).map_err(|error| Refusal::failed(format!("signals: {error}")));
        Ok(Signals {
            terminate: catch(SignalKind::terminate())?,
            interrupt: catch(SignalKind::interrupt())?,
        })
    }

    /// Waits for either.
    async fn first(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CpuList;

    #[test]
    fn lists_of_cpus() {
        let list = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(list("0"), Ok(vec![0]));
        assert_eq!(list("3,0-1,1"), Ok(vec![0, 1, 3]));
        for wrong in ["", "a", "1-", "2-1", "0-9999", "-1", "0;1"] {
            assert!(list(wrong).is_err(), "{wrong:?}");
        }
    }
}
