//! One controller of a subsystem, and what is known of its namespace: connected, enabled, asked,
//! kept alive, reset.
//!
//! ```text
//! connect (admin) ─► enable ─► identify ─► connect (I/O) ─► in use ─► reset, or lost
//! ```
//!
//! Everything here waits for the other side, each time for so long and no longer.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U16;

use super::authentication::authenticate;
use super::wire::{Payload, Wire};
use super::{ANSWER_WITHIN, END_WITHIN, KEEP_ALIVE, SIGN_WITHIN, Target, Trouble};
use crate::clock::machine_time;
use crate::nvme::chap::Names;
use crate::nvme::command::{
    COMMAND_BYTES, Command, Completion, ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity,
    Status,
};
use crate::nvme::fabrics::{
    ANY_CONTROLLER, Connect, ConnectData, Property, nqn_field, property_get, property_set,
};
use crate::nvme::power_cycle::PowerCycle;

/// Nor may it act for longer than this after it has heard the last of us: reads and writes wait.
const LASTS_MAX: Duration = Duration::from_secs(60);
/// How long a read or write of labels may take.
const MOVE_WITHIN: Duration = Duration::from_secs(5);
/// How often a controller that is being enabled is looked at.
const STEP_EVERY: Duration = Duration::from_millis(2);
const ADMIN_ENTRIES: u16 = 32;
/// More are never out on one connection; what else is asked waits here.
const IO_ENTRIES_MAX: u16 = 129;
/// Data of Connect goes with it: so much is always taken (Base 6.3).
const CONNECT_CAPSULE_BYTES: usize = 8192;
/// Bytes of one command.
const TRANSFER_BYTES_MAX: usize = 1 << 20;

/// CC: enabled; entries of 2^6 and 2^4 bytes; pages of 4 KiB; the NVM command set (Base 3.1.3.5).
const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
const CSTS_READY: u32 = 1;
const CSTS_FATAL: u32 = 1 << 1;

/// What names a namespace for good; zeroes where it has none of a kind (Base 4.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    pub nguid: [u8; 16],
    pub uuid: [u8; 16],
    pub eui64: [u8; 8],
}

impl Name {
    pub fn is_none(&self) -> bool {
        self.nguid == [0; 16] && self.uuid == [0; 16] && self.eui64 == [0; 8]
    }
}

/// What the namespace is, and what it can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub controller: ControllerIdentity,
    pub namespace: u32,
    pub its: NamespaceIdentity,
    pub name: Name,
    /// Most bytes of one command.
    pub transfer_bytes: usize,
    /// `None`: it does not say.
    pub power: Option<PowerCycle>,
}

impl Identity {
    /// Whether `now` is what this was, perhaps with more room. Without a name it goes by the
    /// subsystem's serial number and the namespace's.
    pub(super) fn is_still(&self, now: &Identity) -> bool {
        let same_name = match self.name.is_none() {
            true => {
                now.name.is_none()
                    && self.controller.serial == now.controller.serial
                    && self.namespace == now.namespace
            }
            false => self.name == now.name,
        };
        same_name
            && self.its.block_log2 == now.its.block_log2
            && self.its.blocks <= now.its.blocks
            // What was written as durable would be so no longer.
            && self.controller.volatile_cache == now.controller.volatile_cache
    }
}

/// Of the controller's identity, what only fabrics have (Base figure 275).
struct FabricsIdentity {
    /// KAS: unit of KATO; zero: there is no keep-alive.
    keep_alive_unit: Duration,
    /// TBKAS: any command keeps alive, and a silent host is noticed in the period after.
    by_traffic: bool,
    /// CQT: how long commands may go on after that.
    quiesce: Duration,
    /// Most data in a capsule for I/O.
    capsule_bytes: usize,
    /// MAXCMD; 0: it does not say.
    commands_max: u16,
}

impl FabricsIdentity {
    fn decode(page: &[u8; IDENTIFY_BYTES]) -> FabricsIdentity {
        let word = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
        let long = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| page[at + i]));
        // IOCCSZ, in units of 16 bytes, has the command, too; with an offset before data (ICDOFF)
        // nothing is sent that way.
        let capsule = usize::try_from(long(1792)).unwrap_or(0).saturating_mul(16);
        let capsule = capsule.saturating_sub(COMMAND_BYTES).min(TRANSFER_BYTES_MAX);
        FabricsIdentity {
            keep_alive_unit: Duration::from_millis(100) * u32::from(word(320)),
            by_traffic: long(96) & 1 << 6 != 0,
            quiesce: Duration::from_millis(u64::from(word(386))),
            capsule_bytes: if word(1800) == 0 { capsule } else { 0 },
            commands_max: word(514),
        }
    }

    /// How long the controller may act after it has heard the last of us. An error: nobody would
    /// wait for so long.
    fn lasts(&self) -> Result<Duration, Trouble> {
        let unit = self.keep_alive_unit.max(Duration::from_millis(1)).as_millis();
        let units = KEEP_ALIVE.as_millis().div_ceil(unit);
        let kept = Duration::from_millis(u64::try_from(units * unit).unwrap_or(u64::MAX));
        let lasts = kept * if self.by_traffic { 2 } else { 1 } + self.quiesce;
        let endless = "it may go on for more than a minute after a connection was lost";
        if lasts <= LASTS_MAX { Ok(lasts) } else { Err(Trouble::Unsuitable(endless)) }
    }
}

pub(super) struct Association {
    admin: Wire,
    io: Wire,
    identity: Identity,
    lasts: Duration,
    /// Commands at a time on the connection for I/O.
    depth: u16,
}

/// The connection for I/O, for a reactor.
pub(super) struct Link {
    pub(super) io: Wire,
    pub(super) depth: u16,
    pub(super) power: Option<PowerCycle>,
}

impl Link {
    /// Another hold on the connection, to end it by; `None`: there are no descriptors left.
    pub(super) fn tap(&self) -> Option<TcpStream> {
        self.io.tap()
    }
}

impl Association {
    pub(super) fn open(target: &Target) -> Result<Association, Trouble> {
        let mut admin = connect(target, &target.subsystem, KEEP_ALIVE)?;
        let address = admin.wire.address()?;
        let entries = enable(&mut admin.wire)?;
        let mut page = [0; IDENTIFY_BYTES];
        ask(&mut admin.wire, Command::identify_controller(), &mut page, "Identify Controller")?;
        let controller = ControllerIdentity::decode(&page);
        let fabrics = FabricsIdentity::decode(&page);
        let identity = identify(&mut admin.wire, target.namespace, controller)?;
        let count = Command::set_queue_count(1);
        call(&mut admin.wire, count, Payload::None, "Set Features, Number of Queues")?;

        let most = match fabrics.commands_max {
            0 => entries,
            most => entries.min(most.saturating_add(1)),
        };
        let entries = most.clamp(2, IO_ENTRIES_MAX);
        let mut io = Wire::open(address, target.digests)?;
        let queue = Connect { queue: 1, entries, no_flow_control: false, keep_alive_ms: 0 };
        join(&mut io, target, (&target.subsystem, admin.controller), queue)?;
        io.capsule_bytes = fabrics.capsule_bytes;
        let lasts = fabrics.lasts()?;
        Ok(Association { admin: admin.wire, io, identity, lasts, depth: entries - 1 })
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Keeps it alive: what goes over the other connection may not count.
    pub(super) fn keep_alive(&mut self) -> Result<(), Trouble> {
        give_sign(&mut self.admin)
    }

    /// How long the controller may act on what it was asked, once it hears nothing more.
    pub(super) fn lasts(&self) -> Duration {
        self.lasts
    }

    /// The connection for I/O apart from the rest.
    pub(super) fn split(self) -> (Admin, Link) {
        let namespace = self.identity.namespace;
        let admin = Admin { wire: self.admin, namespace, lasts: self.lasts };
        (admin, Link { io: self.io, depth: self.depth, power: self.identity.power })
    }

    /// Nobody needs it any more. An error: the controller may still be at what it was asked.
    pub(super) fn end(self) -> Result<(), Trouble> {
        let (admin, link) = self.split();
        drop(link);
        admin.reset()
    }

    pub(super) fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Trouble> {
        let (namespace, log2) = (self.identity.namespace, self.identity.its.block_log2);
        let mut at = offset;
        for part in bytes.chunks_mut(self.identity.transfer_bytes) {
            let blocks = u32::try_from(part.len() >> log2).expect("a megabyte at most");
            let command = Command::read(namespace, at >> log2, blocks);
            at += part.len() as u64;
            finish(self.io.call(command, Payload::In(part), MOVE_WITHIN, "a read")?, "a read")?;
        }
        Ok(())
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Trouble> {
        let (namespace, log2) = (self.identity.namespace, self.identity.its.block_log2);
        let mut at = offset;
        for part in bytes.chunks(self.identity.transfer_bytes) {
            let blocks = u32::try_from(part.len() >> log2).expect("a megabyte at most");
            let command = Command::write(namespace, at >> log2, blocks);
            at += part.len() as u64;
            finish(self.io.call(command, Payload::Out(part), MOVE_WITHIN, "a write")?, "a write")?;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<(), Trouble> {
        if !self.identity.controller.volatile_cache {
            return Ok(());
        }
        let flush = Command::flush(self.identity.namespace);
        finish(self.io.call(flush, Payload::None, MOVE_WITHIN, "a flush")?, "a flush")
    }
}

/// The connection for questions, of an association whose other one a reactor has.
pub(super) struct Admin {
    wire: Wire,
    namespace: u32,
    pub(super) lasts: Duration,
}

impl Admin {
    pub(super) fn keep_alive(&mut self) -> Result<(), Trouble> {
        give_sign(&mut self.wire)
    }

    /// Whether the namespace is still the one of this name: another may have got its number, and
    /// answer as if nothing had happened. One question a call, of two in turn; a refusal says
    /// nothing.
    pub(super) fn look(&mut self, name: &Name, turn: usize) -> Result<(), Trouble> {
        let mut page = [0; IDENTIFY_BYTES];
        let asks_for_uuid = turn.is_multiple_of(2);
        let command = match asks_for_uuid {
            true => Command::identify_namespace_descriptors(self.namespace),
            false => Command::identify_namespace(self.namespace),
        };
        let answer = self.wire.call(command, Payload::In(&mut page), SIGN_WITHIN, "Identify")?;
        let is_same = match asks_for_uuid {
            _ if !answer.status.is_success() => true,
            true => uuid_of(&page).is_none_or(|uuid| uuid == name.uuid),
            false => numbers_of(&page) == (name.nguid, name.eui64),
        };
        if is_same { Ok(()) } else { Err(Trouble::Another) }
    }

    /// Resets the controller: once that is done, it does nothing more of what it was asked (Base
    /// 3.7.2).
    pub(super) fn reset(mut self) -> Result<(), Trouble> {
        let until = machine_time() + END_WITHIN;
        let reset = property_set(Property::Configuration, 0);
        let answer = self.wire.call(reset, Payload::None, END_WITHIN, "a reset")?;
        finish(answer, "a reset")?;
        while machine_time() < until {
            let status = property_get(Property::Status);
            let answer = self.wire.call(status, Payload::None, END_WITHIN, "a reset")?;
            if finish(answer, "a reset").is_ok() && answer.result & CSTS_READY == 0 {
                return Ok(());
            }
            std::thread::park_timeout(STEP_EVERY);
        }
        Err(Trouble::Silent("a reset"))
    }
}

fn give_sign(wire: &mut Wire) -> Result<(), Trouble> {
    let (command, what) = (Command::keep_alive(), "Keep Alive");
    finish(wire.call(command, Payload::None, SIGN_WITHIN, what)?, what)
}

/// The admin connection to a controller.
pub(super) struct Joined {
    pub(super) wire: Wire,
    /// CNTLID.
    controller: u16,
}

/// Connects to the first address of the host's that answers, and to a controller there.
pub(super) fn connect(
    target: &Target,
    subsystem: &str,
    keep_alive: Duration,
) -> Result<Joined, Trouble> {
    let unresolved = |error: std::io::Error| Trouble::Unresolved(error.to_string());
    let addresses = (target.host.as_str(), target.port).to_socket_addrs().map_err(unresolved)?;
    let mut trouble = Trouble::Unresolved("it has no address".into());
    for address in addresses {
        match reach(target, address, subsystem, keep_alive) {
            Ok(joined) => return Ok(joined),
            Err(its) => trouble = its,
        }
    }
    Err(trouble)
}

fn reach(
    target: &Target,
    address: SocketAddr,
    subsystem: &str,
    keep_alive: Duration,
) -> Result<Joined, Trouble> {
    let mut wire = Wire::open(address, target.digests)?;
    let keep_alive_ms = u32::try_from(keep_alive.as_millis()).expect("seconds");
    let queue = Connect { queue: 0, entries: ADMIN_ENTRIES, no_flow_control: false, keep_alive_ms };
    let controller = join(&mut wire, target, (subsystem, ANY_CONTROLLER), queue)?;
    Ok(Joined { wire, controller })
}

/// Makes a connection a queue of a controller (Base 6.3); its CNTLID.
fn join(
    wire: &mut Wire,
    target: &Target,
    (subsystem, controller): (&str, u16),
    queue: Connect,
) -> Result<u16, Trouble> {
    let name = |nqn| nqn_field(nqn).ok_or(Trouble::Unsuitable("a name of it is too long"));
    let data = ConnectData {
        host_id: target.host_id,
        controller: U16::new(controller),
        reserved_a: [0; 238],
        subsystem: name(subsystem)?,
        host: name(&target.host_nqn)?,
        reserved_b: [0; 256],
    };
    wire.capsule_bytes = CONNECT_CAPSULE_BYTES;
    let payload = Payload::Out(data.as_bytes());
    let answer = wire.call(queue.command(), payload, ANSWER_WITHIN, "Connect")?;
    if !answer.status.is_success() {
        return Err(refused_to_connect(answer.status));
    }
    let names = Names { host: target.host_nqn.clone(), subsystem: subsystem.to_owned() };
    authenticate(wire, &answer, names, target.credentials.as_ref())?;
    Ok(u16::try_from(answer.result & 0xffff).expect("16 bits"))
}

fn refused_to_connect(status: Status) -> Trouble {
    match Status(status.0 & 0x7ff) {
        Status::CONNECT_INVALID => Trouble::NoSubsystem,
        Status::CONNECT_HOST => Trouble::Stranger,
        Status::AUTHENTICATION_REQUIRED => Trouble::Authentication,
        _ => Trouble::Refused { what: "Connect", status },
    }
}

/// Has the controller take commands; how many entries its queues may have.
pub(super) fn enable(wire: &mut Wire) -> Result<u16, Trouble> {
    let capabilities = call(wire, property_get(Property::Capabilities), Payload::None, "CAP")?;
    // MQES is zero-based; TO is in units of 500 ms.
    let entries = u16::try_from(capabilities.result & 0xffff).expect("16 bits").saturating_add(1);
    let ready_within = Duration::from_millis(500) * (capabilities.result >> 24).max(1);
    if entries < 2 {
        return Err(Trouble::Absurd("queues of one entry"));
    }
    call(wire, property_set(Property::Configuration, ENABLE), Payload::None, "to be enabled")?;
    let until = machine_time() + ready_within;
    loop {
        let status = call(wire, property_get(Property::Status), Payload::None, "CSTS")?.result;
        if status & CSTS_FATAL != 0 {
            return Err(Trouble::Unsuitable("its controller reports a fatal error of its own"));
        }
        if status & CSTS_READY != 0 {
            return Ok(entries);
        }
        if machine_time() > until {
            return Err(Trouble::Silent("to be enabled"));
        }
        std::thread::park_timeout(STEP_EVERY);
    }
}

/// NGUID and EUI64 of a namespace (NVM figure 97).
fn numbers_of(page: &[u8; IDENTIFY_BYTES]) -> ([u8; 16], [u8; 8]) {
    (std::array::from_fn(|i| page[104 + i]), std::array::from_fn(|i| page[120 + i]))
}

fn identify(
    wire: &mut Wire,
    namespace: u32,
    controller: ControllerIdentity,
) -> Result<Identity, Trouble> {
    let mut page = [0; IDENTIFY_BYTES];
    let list = Command::identify_active_namespaces();
    ask(wire, list, &mut page, "Identify Active Namespaces")?;
    let numbers =
        page.chunks_exact(4).map(|its| u32::from_le_bytes([its[0], its[1], its[2], its[3]]));
    let has: Vec<u32> = numbers.take_while(|number| *number != 0).collect();
    if !has.contains(&namespace) {
        return Err(Trouble::NoNamespace { wanted: namespace, has });
    }
    ask(wire, Command::identify_namespace(namespace), &mut page, "Identify Namespace")?;
    let its = NamespaceIdentity::decode(&page);
    let (nguid, eui64) = numbers_of(&page);
    let power = PowerCycle::read(&page);
    let descriptors = Command::identify_namespace_descriptors(namespace);
    // Older controllers do not know it.
    let known = wire.call(descriptors, Payload::In(&mut page), ANSWER_WITHIN, "Identify")?;
    let uuid = known.status.is_success().then(|| uuid_of(&page)).flatten().unwrap_or_default();
    its.check(Trouble::Unsuitable, Trouble::Absurd)?;
    let transfer_bytes = controller.transfer_bytes(TRANSFER_BYTES_MAX);
    let name = Name { nguid, uuid, eui64 };
    Ok(Identity { controller, namespace, its, name, transfer_bytes, power })
}

/// The UUID among a namespace's descriptors: type, length, two bytes, value (Base figure 277).
fn uuid_of(page: &[u8; IDENTIFY_BYTES]) -> Option<[u8; 16]> {
    const TYPE_UUID: u8 = 3;
    let mut rest = page.as_slice();
    while let [kind, len, _, _, value @ ..] = rest
        && *len > 0
    {
        let value_bytes = value.get(..usize::from(*len))?;
        if *kind == TYPE_UUID {
            return value_bytes.try_into().ok();
        }
        rest = &value[usize::from(*len)..];
    }
    None
}

/// A question that is answered with a page.
fn ask(
    wire: &mut Wire,
    question: Command,
    page: &mut [u8],
    what: &'static str,
) -> Result<(), Trouble> {
    page.fill(0);
    call(wire, question, Payload::In(page), what).map(|_| ())
}

pub(super) fn call(
    wire: &mut Wire,
    command: Command,
    payload: Payload<'_>,
    what: &'static str,
) -> Result<Completion, Trouble> {
    let answer = wire.call(command, payload, ANSWER_WITHIN, what)?;
    finish(answer, what).map(|()| answer)
}

fn finish(answer: Completion, what: &'static str) -> Result<(), Trouble> {
    match answer.status.is_success() {
        true => Ok(()),
        false => Err(Trouble::Refused { what, status: answer.status }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_goes_on_for_minutes_is_not_waited_for() {
        let lasts = |kas: u16, traffic: u32, cqt: u16| {
            let mut page = [0; IDENTIFY_BYTES];
            page[320..322].copy_from_slice(&kas.to_le_bytes());
            page[96..100].copy_from_slice(&(traffic << 6).to_le_bytes());
            page[386..388].copy_from_slice(&cqt.to_le_bytes());
            let lasts = FabricsIdentity::decode(&page).lasts();
            lasts.ok().map(|its| u32::try_from(its.as_millis()).unwrap())
        };
        assert_eq!(lasts(0, 0, 0), Some(2000));
        assert_eq!(lasts(10, 0, 2000), Some(4000));
        assert_eq!(lasts(100, 1, 0), Some(20_000));
        assert_eq!(lasts(300, 1, 0), Some(60_000));
        assert_eq!(lasts(300, 1, 1), None);
        assert_eq!(lasts(u16::MAX, 0, 0), None);
    }
}
