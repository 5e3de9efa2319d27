//! How a connection is set up: the hosts's first two PDUs and our answers, on a thread of its own
//! that waits no longer than [`SETUP_WITHIN`].
//!
//! ```text
//! host                               here
//!   ICReq ─────────────────────────►   version, alignment, digests
//!   ◄───────────────────────── ICResp
//!   Connect, of a queue ───────────►   subsystem, host, controller: who may what
//!   ◄───────────────────── completion  and from here on the connection lives on a reactor
//! ```

use std::io::{Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ashlar_reactor::nvme::command::{Command, Completion, Status};
use ashlar_reactor::nvme::fabrics::{
    self, ANY_CONTROLLER, Connect, ConnectData, DISCOVERY_NQN, nqn_from,
};
use ashlar_reactor::nvme::pdu::{
    COMMON_BYTES, CapsuleResp, Common, Digests, Fault, H2C_DATA_BYTES_MIN, IcReq, IcResp, Kind,
    Shape, TermReq, VERSION, header,
};
use zerocopy::IntoBytes;

use crate::line;
use crate::nvme_tcp::branch::Branch;
use crate::nvme_tcp::connection::{Connection, Setup};
use crate::nvme_tcp::controller::{Association, Controller, HostName, NoQueue};
use crate::nvme_tcp::identify::{QUEUE_ENTRIES_MAX, TRANSFER_BYTES_MAX};
use crate::nvme_tcp::inbox::{CapsuleData, Found, PDU_BYTES_MAX, look};
use crate::nvme_tcp::port::{Port, Seat, hang_up};
use crate::tcp;

/// Who has not connected a queue by then has to go.
const SETUP_WITHIN: Duration = Duration::from_secs(10);
/// So long a host waits for what is under way of its former controller.
pub(crate) const REST_WITHIN: Duration = Duration::from_secs(5);
/// Data to the host begins at a multiple of 4 to 128 bytes (section 3.6.2.2).
const ALIGNMENT_MAX: u8 = 31;
const _: () = assert!(TRANSFER_BYTES_MAX >= H2C_DATA_BYTES_MIN);

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it has sent what it must not: {0}")]
    Fault(Fault),
    #[error("{0}")]
    Connect(String),
    #[error("it is not served any more")]
    Gone,
}

/// Where in Connect a parameter that was refused is (figure 382: IPO, IATTR).
#[derive(Clone, Copy)]
enum At {
    Command(u32),
    Data(u32),
    Nowhere,
}

/// What the host is told in place of being served.
struct Rejection {
    status: Status,
    at: At,
    why: String,
}

impl Rejection {
    fn new(status: Status, at: At, why: impl Into<String>) -> Rejection {
        Rejection { status, at, why: why.into() }
    }
}

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

/// The body of the thread.
pub(crate) fn shake_hands(port: &Arc<Port>, stream: TcpStream, seat: Seat) -> Result<(), Refused> {
    tcp::prepare(&stream)?;
    let mut wire = Wire { stream, until: now() + SETUP_WITHIN };
    let (digests, alignment) = wire.agree()?;
    let (command, data) = wire.read_connect(digests)?;
    let connect = Connect::from_command(&command);
    let asked = connect.ok_or_else(|| {
        Rejection::new(Status::CONNECT_INVALID.for_good(), At::Command(40), "an unknown format")
    });
    let admitted = asked.and_then(|asked| Ok((asked, admit(port, &wire.stream, asked, &data)?)));
    let (connect, Admitted { controller, home }) = match admitted {
        Ok(admitted) => admitted,
        Err(rejection) => {
            wire.reject(&command, digests, &rejection)?;
            return Err(Refused::Connect(rejection.why));
        }
    };
    let queue = connect.queue;
    // From here on the controller counts this queue, until it is told otherwise.
    let mut place = || -> Result<(), Refused> {
        wire.accept(&command, connect, digests, controller.its.id)?;
        wire.stream.set_read_timeout(None)?;
        wire.stream.set_write_timeout(None)?;
        Ok(())
    };
    place().inspect_err(|_| controller.remove_queue(queue))?;
    home.take(Setup {
        stream: wire.stream,
        queue,
        entries: connect.entries,
        digests,
        alignment,
        flow_control: !connect.no_flow_control,
        controller,
        seat,
    })
}

/// Whether a queue may be connected, and to what.
fn admit(
    port: &Arc<Port>,
    stream: &TcpStream,
    connect: Connect,
    data: &ConnectData,
) -> Result<Admitted, Rejection> {
    let invalid = Status::CONNECT_INVALID.for_good();
    if connect.entries > QUEUE_ENTRIES_MAX {
        let text = format!("a queue of {} entries", connect.entries);
        return Err(Rejection::new(invalid, At::Command(44), text));
    }
    let name = |field, at| {
        let none = || Rejection::new(invalid, At::Data(at), "a name that is none");
        nqn_from(field).filter(|name| !name.is_empty()).map(str::to_owned).ok_or_else(none)
    };
    let subsystem = name(&data.subsystem, 256)?;
    let host = HostName { nqn: name(&data.host, 512)?, id: data.host_id };
    let stream = stream.try_clone().map_err(|error| {
        Rejection::new(Status::INTERNAL, At::Nowhere, format!("no descriptor: {error}"))
    })?;
    let asked = Asked { connect, controller: data.controller.get(), subsystem, host };
    match (connect.queue, asked.subsystem == DISCOVERY_NQN) {
        (0, true) => admit_discovery(port, asked, stream),
        (0, false) => admit_controller(port, asked, stream),
        (_, _) => admit_queue(port, &asked, stream),
    }
}

struct Asked {
    connect: Connect,
    controller: u16,
    subsystem: String,
    host: HostName,
}

impl Asked {
    /// A controller of its own is made for each admin queue.
    fn check_any_controller(&self) -> Result<(), Rejection> {
        if self.controller == ANY_CONTROLLER {
            return Ok(());
        }
        let status = Status::CONNECT_INVALID.for_good();
        Err(Rejection::new(status, At::Data(16), "a controller of its own choice"))
    }

    fn association(&self, port: &Port, stream: &TcpStream) -> Result<Association, Rejection> {
        let at = stream.local_addr().map_err(|error| {
            Rejection::new(Status::INTERNAL, At::Nowhere, format!("no address: {error}"))
        })?;
        let keep_alive = Duration::from_millis(self.connect.keep_alive_ms.into());
        Ok(Association {
            id: port.next_controller(),
            host: self.host.clone(),
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
    asked: Asked,
    stream: TcpStream,
) -> Result<Admitted, Rejection> {
    asked.check_any_controller()?;
    let its = asked.association(port, &stream)?;
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
    asked: Asked,
    stream: TcpStream,
) -> Result<Admitted, Rejection> {
    asked.check_any_controller()?;
    let its = asked.association(port, &stream)?;
    wait_for_former(port, &asked)?;
    let mut inner = port.inner();
    let subsystem = find(&mut inner.subsystems, &asked)?;
    let its = Association { serial: subsystem.serial, queues_max: subsystem.queues_max, ..its };
    let home = Home::Branch(subsystem.lines.first().clone());
    let controller = Controller::new(its, stream);
    subsystem.prune();
    subsystem.controllers.push(controller.clone());
    Ok(Admitted { controller, home })
}

type Subsystems = std::collections::BTreeMap<String, crate::nvme_tcp::port::Subsystem>;

fn find<'a>(
    subsystems: &'a mut Subsystems,
    asked: &Asked,
) -> Result<&'a mut crate::nvme_tcp::port::Subsystem, Rejection> {
    let Asked { subsystem, host, .. } = asked;
    let none = || {
        let status = Status::CONNECT_INVALID.for_good();
        Rejection::new(status, At::Data(256), format!("there is no subsystem {subsystem}"))
    };
    let found = subsystems.get_mut(subsystem).ok_or_else(none)?;
    if !found.allows(&host.nqn) {
        let text = format!("{} is no host of {subsystem}", host.nqn);
        return Err(Rejection::new(Status::CONNECT_HOST.for_good(), At::Data(512), text));
    }
    Ok(found)
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

fn admit_queue(port: &Port, asked: &Asked, stream: TcpStream) -> Result<Admitted, Rejection> {
    let Asked { connect, controller, host, .. } = asked;
    let invalid = Status::CONNECT_INVALID.for_good();
    let mut inner = port.inner();
    let subsystem = find(&mut inner.subsystems, asked)?;
    let its =
        subsystem.controllers.iter().find(|one| one.its.id == *controller && one.its.host == *host);
    let none = || Rejection::new(invalid, At::Data(16), "it has no such controller");
    let its = its.ok_or_else(none)?.clone();
    let lines = subsystem.lines.clone();
    drop(inner);
    its.add_queue(connect.queue, stream).map_err(|why| match why {
        NoQueue::NotEnabled => {
            Rejection::new(Status::SEQUENCE.for_good(), At::Nowhere, "it is not enabled")
        }
        NoQueue::Exists => {
            // Perhaps not for long: one that has hung up is there until it is at rest.
            let text = format!("queue {} is connected already", connect.queue);
            Rejection::new(Status::SEQUENCE, At::Nowhere, text)
        }
        NoQueue::TooMany => {
            let text = format!("there is no queue {}", connect.queue);
            Rejection::new(invalid, At::Command(42), text)
        }
    })?;
    // Queue 1 goes to the first, and so on, in turn.
    let home = Home::Branch(lines.of_ring(usize::from(connect.queue - 1)).clone());
    Ok(Admitted { controller: its, home })
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

/// The connection while it is set up.
struct Wire {
    stream: TcpStream,
    until: Instant,
}

impl Wire {
    fn read(&mut self, into: &mut [u8]) -> Result<(), std::io::Error> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let left = self.until.saturating_duration_since(now());
            if left.is_zero() {
                let text = format!("it did not say who it is for {} s", SETUP_WITHIN.as_secs());
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(rest) {
                Ok(0) => {
                    let text = "it has closed the connection before it was set up";
                    return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text));
                }
                Ok(more) => done += more,
                // Looked at again above.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), std::io::Error> {
        let left = self.until.saturating_duration_since(now()).max(Duration::from_millis(1));
        self.stream.set_write_timeout(Some(left))?;
        self.stream.write_all(bytes)
    }

    /// The first PDUs of both sides: digests, and the alignment of data to the host.
    fn agree(&mut self) -> Result<(Digests, u8), Refused> {
        let mut bytes = [0; size_of::<IcReq>()];
        self.read(&mut bytes[..COMMON_BYTES])?;
        if let Err(fault) = begins_well(&bytes) {
            return Err(self.end(fault, &bytes[..COMMON_BYTES]));
        }
        self.read(&mut bytes[COMMON_BYTES..])?;
        let request: IcReq = header(&bytes).ok_or(Refused::Fault(Fault::Header(4)))?;
        let fault = match (request.version.get(), request.alignment) {
            (VERSION, 0..=ALIGNMENT_MAX) => None,
            (VERSION, _) => Some(Fault::Header(10)),
            (_, _) => Some(Fault::Unsupported(8)),
        };
        if let Some(fault) = fault {
            return Err(self.end(fault, &bytes));
        }
        let digests = Digests::from_byte(request.digests);
        let shape = Shape::new(Kind::IcResp, 0, 0, Digests::default());
        let response = IcResp {
            common: shape.common(0),
            version: VERSION.into(),
            alignment: 0,
            digests: digests.to_byte(),
            h2c_data_bytes_max: TRANSFER_BYTES_MAX.into(),
            reserved: [0; 112],
        };
        self.write(response.as_bytes())?;
        Ok((digests, request.alignment))
    }

    /// The second PDU of the host: Connect, with its data.
    fn read_connect(&mut self, digests: Digests) -> Result<(Command, ConnectData), Refused> {
        let mut bytes = vec![0; COMMON_BYTES];
        self.read(&mut bytes)?;
        let common: Common = header(&bytes).ok_or(Refused::Fault(Fault::Header(4)))?;
        let shape = Shape::read(&common, digests).and_then(|shape| {
            let is_command = shape.kind == Kind::CapsuleCmd;
            match (is_command, shape.bytes() <= PDU_BYTES_MAX) {
                (true, true) => Ok(shape),
                (true, false) => Err(Fault::LimitExceeded),
                (false, _) => Err(Fault::Sequence),
            }
        });
        let shape = shape.map_err(|fault| self.end(fault, &bytes))?;
        bytes.resize(shape.bytes(), 0);
        self.read(&mut bytes[COMMON_BYTES..])?;
        let found = look(&bytes, digests).map_err(|fault| self.end(fault, &bytes))?;
        let Found::Command { command, data: CapsuleData::At(range), .. } = found else {
            return Err(self.end(Fault::Sequence, &bytes));
        };
        let is_connect = command.opcode() == fabrics::OPCODE
            && fabrics::Kind::of(&command) == Some(fabrics::Kind::Connect);
        let data = bytes.get(range).and_then(header::<ConnectData>);
        match data.filter(|_| is_connect) {
            Some(data) => Ok((command, data)),
            None => Err(self.end(Fault::Sequence, &bytes)),
        }
    }

    fn accept(
        &mut self,
        command: &Command,
        connect: Connect,
        digests: Digests,
        controller: u16,
    ) -> Result<(), Refused> {
        // A host that does without flow control is told so.
        let head = if connect.no_flow_control { u16::MAX } else { 1 % connect.entries };
        self.complete(command, digests, (Status::SUCCESS, controller.into(), head))
    }

    fn reject(
        &mut self,
        command: &Command,
        digests: Digests,
        rejection: &Rejection,
    ) -> Result<(), Refused> {
        let result = match rejection.at {
            At::Command(at) => at,
            At::Data(at) => at | 1 << 16,
            At::Nowhere => 0,
        };
        self.complete(command, digests, (rejection.status, result, 0))?;
        self.farewell();
        Ok(())
    }

    fn complete(
        &mut self,
        command: &Command,
        digests: Digests,
        (status, result, submission_head): (Status, u32, u16),
    ) -> Result<(), Refused> {
        let shape = Shape::new(Kind::CapsuleResp, 0, 0, digests);
        let completion = Completion {
            result,
            result_high: 0,
            submission_head,
            queue: 0,
            id: command.id(),
            phase: false,
            status,
        };
        let header = CapsuleResp { common: shape.common(0), completion: completion.to_bytes() };
        let mut bytes = vec![0; shape.data_at];
        shape.write_head(&header, &mut bytes);
        Ok(self.write(&bytes)?)
    }

    /// Tells the host what it has done wrong.
    fn end(&mut self, fault: Fault, about: &[u8]) -> Refused {
        let quote = about.get(..about.len().min(COMMON_BYTES)).unwrap_or_default();
        let shape = Shape::quoting(Kind::C2hTermReq, quote.len());
        let term = TermReq {
            common: shape.common(0),
            reason: fault.reason().into(),
            detail: fault.detail().into(),
            reserved: [0; 10],
        };
        let told = self.write(&[term.as_bytes(), quote].concat());
        if told.is_ok() {
            self.farewell();
        }
        Refused::Fault(fault)
    }

    /// Closes our end; the host gets what was sent, if it reads on.
    fn farewell(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let mut rest = [0; 512];
        self.until = self.until.min(now() + Duration::from_secs(1));
        // What it still sends would make the kernel drop what was sent to it.
        while self.read(&mut rest).is_ok() {}
        hang_up(&self.stream);
    }
}

fn begins_well(bytes: &[u8]) -> Result<(), Fault> {
    let common: Common = header(bytes).ok_or(Fault::Header(4))?;
    let shape = Shape::read(&common, Digests::default())?;
    if shape.kind == Kind::IcReq { Ok(()) } else { Err(Fault::Sequence) }
}

#[expect(clippy::disallowed_methods, reason = "this thread is no reactor's")]
fn now() -> Instant {
    Instant::now()
}
