//! How a connection is set up: the hosts's first two PDUs and our answers, on a thread of its own
//! that waits for the host no longer than [`SETUP_WITHIN`], its proof included; and then for what
//! its former controller has under way, [`REST_WITHIN`].
//!
//! ```text
//! host                               here
//!   ICReq ─────────────────────────►   version, alignment, digests
//!   ◄───────────────────────── ICResp
//!   Connect, of a queue ───────────►   subsystem, host, controller: who may what
//!   ◄───────────────────── completion  and from here on the connection lives on a reactor
//! ```
//!
//! After the completion a host proves who it is, if it has a secret, and lives on a reactor once it
//! has. Before that nothing changes for the controller: who knows its names and numbers does not
//! get in the way of the host that has them. What it has proven is compared again with what it has
//! to prove under the lock that lets it in: a secret that was changed or revoked is of no use.

use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_reactor::nvme::chap::{self, Secret};
use ashlar_reactor::nvme::command::{Command, Status};
use ashlar_reactor::nvme::fabrics::{
    self, ANY_CONTROLLER, AUTHENTICATE, Connect, ConnectData, DISCOVERY_NQN, nqn_from,
};
use ashlar_reactor::nvme::pdu::{Fault, header};

use crate::line::{self, now};
use crate::nvme_tcp::authentication::authenticate;
use crate::nvme_tcp::branch::Branch;
use crate::nvme_tcp::connection::{Connection, Setup};
use crate::nvme_tcp::controller::{Association, Controller, HostName, NoQueue};
use crate::nvme_tcp::identify::QUEUE_ENTRIES_MAX;
use crate::nvme_tcp::port::{Port, Seat, Subsystem};
use crate::nvme_tcp::wire::{At, Refused, Rejection, Taken, Wire};
use crate::tcp;

/// Who has not connected a queue by then, and proven what it has to, has to go.
const SETUP_WITHIN: Duration = Duration::from_secs(10);
/// So long a host waits for what is under way of its former controller.
pub(crate) const REST_WITHIN: Duration = Duration::from_secs(5);

/// Who is let in, and where to.
struct Admitted {
    controller: Arc<Controller>,
    home: Home,
}

enum Home {
    /// A branch of the controller's subsystem.
    Branch(line::Line<Branch>),
    /// Any reactor: a discovery controller needs none of its own.
    Core(ashlar_reactor::mailbox::Sender),
}

/// Who it says it is, and what it wants to connect to.
pub(crate) struct Caller {
    pub(crate) host: String,
    pub(crate) subsystem: String,
}

/// The body of the thread. `caller`: once it has said so.
pub(crate) fn shake_hands(
    port: &Arc<Port>,
    stream: TcpStream,
    seat: Seat,
    caller: &mut Option<Caller>,
) -> Result<(), Refused> {
    tcp::prepare(&stream)?;
    let mut wire = Wire::new(stream, SETUP_WITHIN);
    wire.agree()?;
    let (command, data) = read_connect(&mut wire)?;
    let asked = Asked::of(port, &command, &data);
    *caller = asked.as_ref().ok().map(|Asked { host, subsystem, .. }| Caller {
        host: host.nqn.clone(),
        subsystem: subsystem.clone(),
    });
    let asked = asked.and_then(|asked| Ok((proof_of(port, &asked)?, asked)));
    let admitted = match asked {
        Ok((None, asked)) => {
            admit(port, &asked, None, &wire.stream).map(|admitted| (asked, admitted, false))
        }
        Ok((Some((proof, secret)), asked)) => match check(port, &asked) {
            Ok(()) => {
                accept(&mut wire, &command, &asked, AUTHENTICATE)?;
                authenticate(&mut wire, asked.connect, proof, &port.house)?;
                // It was told that it may; what was in its way before is told no more.
                let late = |rejection: Rejection| Refused::Connect(rejection.why);
                let admitted = admit(port, &asked, Some(&secret), &wire.stream).map_err(late)?;
                Ok((asked, admitted, true))
            }
            Err(rejection) => Err(rejection),
        },
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok((asked, admitted, is_accepted)) => {
            settle(wire, seat, &command, &asked, admitted, is_accepted)
        }
        Err(rejection) => {
            wire.reject(&command, &rejection)?;
            Err(Refused::Connect(rejection.why))
        }
    }
}

/// Has the connection served; its host is told that it is let in, if it does not know yet.
fn settle(
    mut wire: Wire,
    seat: Seat,
    command: &Command,
    asked: &Asked,
    Admitted { controller, home }: Admitted,
    is_accepted: bool,
) -> Result<(), Refused> {
    let Connect { queue, entries, no_flow_control, .. } = asked.connect;
    // From here on the controller counts this queue, until it is told otherwise.
    let mut place = || -> Result<(), Refused> {
        if !is_accepted {
            accept(&mut wire, command, asked, 0)?;
        }
        wire.stream.set_read_timeout(None)?;
        wire.stream.set_write_timeout(None)?;
        Ok(())
    };
    place().inspect_err(|_| controller.remove_queue(queue))?;
    home.take(Setup {
        queue,
        entries,
        head: wire.head(entries),
        digests: wire.digests(),
        alignment: wire.alignment(),
        flow_control: !no_flow_control,
        stream: wire.stream,
        controller,
        seat,
    })
}

/// The second PDU of the host: Connect, with its data.
fn read_connect(wire: &mut Wire) -> Result<(Command, ConnectData), Refused> {
    let Taken { command, data } = wire.take()?;
    let is_connect = fabrics::Kind::of(&command) == Some(fabrics::Kind::Connect);
    let data = data.as_deref().and_then(header::<ConnectData>);
    match data.filter(|_| is_connect) {
        Some(data) => Ok((command, data)),
        None => Err(wire.end(Fault::Sequence, &[])),
    }
}

/// `authentication`: what of it the host has to do (AUTHREQ).
fn accept(
    wire: &mut Wire,
    command: &Command,
    asked: &Asked,
    authentication: u32,
) -> Result<(), Refused> {
    let Connect { entries, no_flow_control, .. } = asked.connect;
    // A host that does without flow control is told so.
    let head = if no_flow_control { u16::MAX } else { wire.head(entries) };
    wire.complete(command, Status::SUCCESS, u32::from(asked.id) | authentication, head)
}

/// What a host has to prove, if anything: that it knows this secret.
fn proof_of(port: &Port, asked: &Asked) -> Result<Option<(chap::Controller, Secret)>, Rejection> {
    let inner = port.inner();
    let subsystem = inner.subsystems.get(&asked.subsystem);
    let Some(subsystem) = subsystem.filter(|its| its.allows(&asked.host.nqn)) else {
        return Ok(None);
    };
    let Some(secret) = subsystem.secret_of(&asked.host.nqn).cloned() else { return Ok(None) };
    let names = chap::Names { host: asked.host.nqn.clone(), subsystem: asked.subsystem.clone() };
    let own = subsystem.secrets.subsystem.clone();
    let proof = chap::Controller::new(names, secret.clone(), own).map_err(|error| {
        Rejection::new(Status::INTERNAL, At::Nowhere, format!("no random numbers: {error}"))
    })?;
    Ok(Some((proof, secret)))
}

/// Whether what a host has proven, if anything, is what it has to prove now.
fn check_proof(
    subsystem: &Subsystem,
    asked: &Asked,
    proven: Option<&Secret>,
) -> Result<(), Rejection> {
    let due = subsystem.secret_of(&asked.host.nqn);
    if due.is_none() || due == proven {
        return Ok(());
    }
    // It may come again at once.
    let text = "what it has to prove was changed meanwhile";
    Err(Rejection::new(Status::CONNECT_BUSY, At::Nowhere, text))
}

/// What can be refused before a host has proven who it is.
fn check(port: &Port, asked: &Asked) -> Result<(), Rejection> {
    let mut inner = port.inner();
    let subsystem = find(&mut inner.subsystems, asked)?;
    if asked.connect.queue == 0 {
        check_complete(port, asked)?;
        return asked.check_any_controller();
    }
    let controller = find_controller(subsystem, asked)?;
    controller.check_queue(asked.connect.queue).map_err(|why| no_queue(why, asked))
}

/// Whether a queue may be connected, and to what. `proven`: what its host has proven to know.
fn admit(
    port: &Arc<Port>,
    asked: &Asked,
    proven: Option<&Secret>,
    stream: &TcpStream,
) -> Result<Admitted, Rejection> {
    let stream = stream.try_clone().map_err(|error| {
        Rejection::new(Status::INTERNAL, At::Nowhere, format!("no descriptor: {error}"))
    })?;
    match (asked.connect.queue, asked.subsystem == DISCOVERY_NQN) {
        (0, true) => admit_discovery(port, asked, stream),
        (0, false) => admit_controller(port, asked, proven, stream),
        (_, _) => admit_queue(port, asked, proven, stream),
    }
}

/// What a host wants.
struct Asked {
    connect: Connect,
    /// The controller that it names.
    controller: u16,
    /// The one that it gets: a new one with its admin queue.
    id: u16,
    subsystem: String,
    host: HostName,
}

impl Asked {
    fn of(port: &Port, command: &Command, data: &ConnectData) -> Result<Asked, Rejection> {
        let invalid = Status::CONNECT_INVALID.for_good();
        let connect = Connect::from_command(command)
            .ok_or_else(|| Rejection::new(invalid, At::Command(40), "an unknown format"))?;
        if connect.entries > QUEUE_ENTRIES_MAX {
            let text = format!("a queue of {} entries", connect.entries);
            return Err(Rejection::new(invalid, At::Command(44), text));
        }
        // Base figure 381: it tells hosts apart, and zero is none.
        if data.host_id == [0; 16] {
            return Err(Rejection::new(invalid, At::Data(0), "a host identifier of zero"));
        }
        let name = |field, at| {
            let none = || Rejection::new(invalid, At::Data(at), "a name that is none");
            nqn_from(field).filter(|name| !name.is_empty()).map(str::to_owned).ok_or_else(none)
        };
        let subsystem = name(&data.subsystem, 256)?;
        let host = HostName { nqn: name(&data.host, 512)?, id: data.host_id };
        let controller = data.controller.get();
        let id = if connect.queue == 0 { port.next_controller() } else { controller };
        Ok(Asked { connect, controller, id, subsystem, host })
    }

    /// A controller of its own is made for each admin queue.
    fn check_any_controller(&self) -> Result<(), Rejection> {
        if self.controller == ANY_CONTROLLER {
            return Ok(());
        }
        let status = Status::CONNECT_INVALID.for_good();
        Err(Rejection::new(status, At::Data(16), "a controller of its own choice"))
    }

    fn association(&self, stream: &TcpStream) -> Result<Association, Rejection> {
        let at = stream.local_addr().map_err(|error| {
            Rejection::new(Status::INTERNAL, At::Nowhere, format!("no address: {error}"))
        })?;
        let keep_alive = Duration::from_millis(self.connect.keep_alive_ms.into());
        Ok(Association {
            id: self.id,
            host: self.host.clone(),
            is_proven: false,
            subsystem: self.subsystem.clone(),
            serial: [b' '; 20],
            discovery: None,
            at,
            queues_max: 0,
            keep_alive: (!keep_alive.is_zero()).then_some(keep_alive),
        })
    }
}

fn admit_discovery(
    port: &Arc<Port>,
    asked: &Asked,
    stream: TcpStream,
) -> Result<Admitted, Rejection> {
    asked.check_any_controller()?;
    let its = asked.association(&stream)?;
    let its = Association { discovery: Some(port.clone()), ..its };
    let mut inner = port.inner();
    let core = inner.subsystems.values().find_map(|its| its.cores.first().cloned());
    let gone = || Rejection::new(Status::CONNECT_BUSY, At::Nowhere, "nothing is offered");
    let home = Home::Core(core.ok_or_else(gone)?);
    let controller = Controller::new(its, stream);
    inner.discovering.retain(|its| !its.is_at_rest());
    inner.discovering.push(controller.clone());
    Ok(Admitted { controller, home })
}

fn admit_controller(
    port: &Arc<Port>,
    asked: &Asked,
    proven: Option<&Secret>,
    stream: TcpStream,
) -> Result<Admitted, Rejection> {
    asked.check_any_controller()?;
    let its = asked.association(&stream)?;
    wait_for_former(port, asked)?;
    let mut inner = port.inner();
    let subsystem = find(&mut inner.subsystems, asked)?;
    // After it was found: what is to come was announced before the first of it was there.
    check_complete(port, asked)?;
    check_proof(subsystem, asked, proven)?;
    let is_proven = proven.is_some();
    let (serial, queues_max) = (subsystem.serial, subsystem.queues_max);
    let its = Association { is_proven, serial, queues_max, ..its };
    let home = Home::Branch(subsystem.lines.first().clone());
    let controller = Controller::new(its, stream);
    subsystem.prune();
    subsystem.controllers.push(controller.clone());
    Ok(Admitted { controller, home })
}

type Subsystems = std::collections::BTreeMap<String, Subsystem>;

/// What is not there may be coming up: none of this is for good, or hosts that connect again while
/// a daemon starts would give up.
fn find<'a>(subsystems: &'a mut Subsystems, asked: &Asked) -> Result<&'a mut Subsystem, Rejection> {
    let Asked { subsystem, host, .. } = asked;
    let none = || {
        let text = format!("there is no subsystem {subsystem:?}");
        Rejection::new(Status::CONNECT_INVALID, At::Data(256), text)
    };
    let found = subsystems.get_mut(subsystem).ok_or_else(none)?;
    if !found.allows(&host.nqn) {
        let text = format!("{:?} is no host of {subsystem:?}", host.nqn);
        return Err(Rejection::new(Status::CONNECT_HOST, At::Data(512), text));
    }
    Ok(found)
}

/// A host that sees only some of its namespaces takes the others for gone.
fn check_complete(port: &Port, asked: &Asked) -> Result<(), Rejection> {
    if port.is_complete(&asked.subsystem) {
        return Ok(());
    }
    let text = format!("namespaces of {:?} are still to come", asked.subsystem);
    Err(Rejection::new(Status::CONNECT_BUSY, At::Nowhere, text))
}

/// What a host's former controllers have under way ends before the host gets a new one: a late
/// write of the one could overwrite what was written by the other.
fn wait_for_former(port: &Port, asked: &Asked) -> Result<(), Rejection> {
    let former: Vec<Arc<Controller>> = {
        let mut inner = port.inner();
        let subsystem = find(&mut inner.subsystems, asked)?;
        subsystem.prune();
        let is_left = |one: &&Arc<Controller>| one.its.host == asked.host && one.is_left();
        subsystem.controllers.iter().filter(is_left).cloned().collect()
    };
    let until = now() + REST_WITHIN;
    for controller in former {
        if !controller.wait_for_quiet(until.saturating_duration_since(now())) {
            let text = "requests of its former controller are still under way";
            return Err(Rejection::new(Status::CONNECT_BUSY, At::Nowhere, text));
        }
    }
    Ok(())
}

fn find_controller(subsystem: &Subsystem, asked: &Asked) -> Result<Arc<Controller>, Rejection> {
    let Asked { controller, host, .. } = asked;
    let is_its = |one: &&Arc<Controller>| one.its.id == *controller && one.its.host == *host;
    // One that has ended meanwhile: its host makes another.
    subsystem.controllers.iter().find(is_its).cloned().ok_or_else(|| {
        Rejection::new(Status::CONNECT_INVALID, At::Data(16), "it has no such controller")
    })
}

fn no_queue(why: NoQueue, asked: &Asked) -> Rejection {
    let queue = asked.connect.queue;
    match why {
        // Perhaps not any more, since its admin queue was lost.
        NoQueue::NotEnabled => Rejection::new(Status::SEQUENCE, At::Nowhere, "it is not enabled"),
        NoQueue::Exists => {
            // Perhaps not for long: one that has hung up is there until it is at rest.
            let text = format!("queue {queue} is connected already");
            Rejection::new(Status::SEQUENCE, At::Nowhere, text)
        }
        NoQueue::TooMany => {
            let invalid = Status::CONNECT_INVALID.for_good();
            Rejection::new(invalid, At::Command(42), format!("there is no queue {queue}"))
        }
    }
}

fn admit_queue(
    port: &Port,
    asked: &Asked,
    proven: Option<&Secret>,
    stream: TcpStream,
) -> Result<Admitted, Rejection> {
    let mut inner = port.inner();
    let subsystem = find(&mut inner.subsystems, asked)?;
    check_proof(subsystem, asked, proven)?;
    let controller = find_controller(subsystem, asked)?;
    let queue = asked.connect.queue;
    controller.add_queue(queue, stream).map_err(|why| no_queue(why, asked))?;
    // Queue 1 goes to the first, and so on, in turn.
    let home = Home::Branch(subsystem.lines.of_ring(usize::from(queue - 1)).clone());
    Ok(Admitted { controller, home })
}

impl Home {
    /// Begins to serve the connection. Its reactor may be slow: whoever comes first, that or the
    /// end of our patience, has to see to the queue; a late start does nothing.
    fn take(self, setup: Setup) -> Result<(), Refused> {
        let (controller, queue) = (setup.controller.clone(), setup.queue);
        let is_taken = Arc::new(AtomicBool::new(false));
        let taken = is_taken.clone();
        let start = move |branch: &Rc<Branch>| -> std::io::Result<()> {
            if taken.swap(true, Ordering::AcqRel) {
                return Ok(());
            }
            let (controller, queue) = (setup.controller.clone(), setup.queue);
            Connection::start(branch, setup).inspect_err(|_| controller.remove_queue(queue))
        };
        let started = match self {
            Home::Branch(line) => {
                line.ask_and_wait(move |branch| async move { start(&branch) }).ok()
            }
            Home::Core(core) => line::ask(&core, move |reactor, reply| {
                let _ = reply.send(start(&Branch::new(reactor)));
            }),
        };
        if let Some(started) = started {
            return Ok(started?);
        }
        if !is_taken.swap(true, Ordering::AcqRel) {
            controller.remove_queue(queue);
        }
        Err(Refused::Gone)
    }
}
