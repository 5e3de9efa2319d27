//! Commands of the admin queue: fabrics, Identify, log pages, features, events.
//!
//! Sections and figures are of the NVM Express Base Specification 2.0.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ashlar_reactor::backend::Instant;
use ashlar_reactor::nvme::command::{
    self, Admin as Opcode, CNS_ACTIVE_NAMESPACES, CNS_CONTROLLER, CNS_NAMESPACE,
    CNS_NAMESPACE_DESCRIPTORS, Command, FEATURE_KEEP_ALIVE, FEATURE_QUEUES, IDENTIFY_BYTES, Sgl,
    Status,
};
use ashlar_reactor::nvme::fabrics::{self, Property, property_of};

use crate::disk::Counters;
use crate::nvme_tcp::connection::{Capsule, Connection, Reply};
use crate::nvme_tcp::controller::Phase;
use crate::nvme_tcp::events::Events;
use crate::nvme_tcp::identify::{
    self, ControllerFacts, NAMESPACES_MAX, QUEUE_ENTRIES_MAX, TRANSFER_BYTES_MAX, VERSION,
};
use crate::nvme_tcp::log_page;

/// Identify, for one command set: of a namespace, of the controller, the active namespaces
/// (figure 273).
const CNS_NAMESPACE_OF_SET: u32 = 0x05;
const CNS_CONTROLLER_OF_SET: u32 = 0x06;
const CNS_ACTIVE_OF_SET: u32 = 0x07;
/// Features beside those that have names in the codec (figure 317).
const FEATURE_ARBITRATION: u32 = 0x01;
const FEATURE_POWER: u32 = 0x02;
const FEATURE_TEMPERATURE: u32 = 0x04;
const FEATURE_ERROR_RECOVERY: u32 = 0x05;
const FEATURE_WRITE_CACHE: u32 = 0x06;
const FEATURE_ATOMICITY: u32 = 0x0a;
const FEATURE_EVENTS: u32 = 0x0b;
const FEATURE_HOST: u32 = 0x81;
/// Set Features: keep it over resets.
const SAVE: u32 = 1 << 31;
/// Of what 128-bit host identifiers begin with in Get Features.
const EXTENDED_HOST: u32 = 1;
/// CAP (figure 36): contiguous queues, ready within 10 s, the NVM command set.
const CAPABILITIES: u64 = (QUEUE_ENTRIES_MAX as u64 - 1) | 1 << 16 | 20 << 24 | 1 << 37;
/// Abort: it was not (figure 144).
const NOT_ABORTED: u64 = 1;

/// What only an admin queue has.
pub(crate) struct Admin {
    pub(crate) events: RefCell<Events>,
    /// When the host gave its last sign of life.
    pub(crate) heard: Cell<Instant>,
    since: Instant,
}

impl Admin {
    pub(crate) fn new(now: Instant) -> Admin {
        Admin { events: RefCell::default(), heard: Cell::new(now), since: now }
    }
}

/// Does a command. `None`: it is answered later.
pub(crate) async fn execute(
    connection: &Rc<Connection>,
    admin: &Admin,
    command: &Command,
    capsule: Capsule,
) -> Option<Reply> {
    if let Capsule::Damaged = capsule {
        return Some(Status::TRANSIENT_TRANSPORT.into());
    }
    if command.opcode() == fabrics::OPCODE {
        return Some(property(connection, admin, command).unwrap_or_else(Reply::from));
    }
    // Room first: while others have it, a command holds nothing but itself.
    let asked = asked(command);
    let Some(room) = connection.claim(asked.unwrap_or(0)).await else {
        return Some(Status::ABORTED.into());
    };
    let page = match perform(connection, admin, command) {
        Ok(Outcome::Reply(reply)) => return Some(reply),
        Ok(Outcome::Later) => return None,
        Ok(Outcome::Page(page)) => page,
        Err(status) => return Some(status.into()),
    };
    let bytes = match asked {
        Ok(bytes) => bytes,
        Err(status) => return Some(status.into()),
    };
    let data = connection.reactor().buffer(bytes);
    data.fill_zero();
    let given = page.len().min(bytes);
    data.slice(0..given).copy_from_slice(&page[..given]);
    let data = Some((data.into(), room));
    Some(Reply { status: Status::SUCCESS, result: 0, data })
}

/// What a command has come to.
enum Outcome {
    Reply(Reply),
    /// Data for the host, who has asked for as much of it as it has room for, or more.
    Page(Vec<u8>),
    /// It waits for an event.
    Later,
}

/// Sections 6.4 and 6.5; Connect comes once, before this.
fn property(connection: &Connection, admin: &Admin, command: &Command) -> Result<Reply, Status> {
    let controller = connection.controller();
    match fabrics::Kind::of(command) {
        Some(fabrics::Kind::PropertyGet) => {
            let property = property_of(command).ok_or(Status::INVALID_FIELD.for_good())?;
            Ok(Reply::result(match property {
                Property::Capabilities => CAPABILITIES,
                Property::Version => VERSION.into(),
                Property::Configuration => controller.configuration().into(),
                Property::Status => controller.status().into(),
            }))
        }
        Some(fabrics::Kind::PropertySet) => {
            if property_of(command) != Some(Property::Configuration) {
                return Err(Status::INVALID_FIELD.for_good());
            }
            controller.configure(command.dwords[12])?;
            if controller.phase() != Phase::Enabled {
                let forgotten = admin.events.borrow_mut().reset();
                connection.forget(forgotten);
            }
            Ok(Status::SUCCESS.into())
        }
        Some(fabrics::Kind::Connect) => Err(Status::SEQUENCE.for_good()),
        Some(
            fabrics::Kind::AuthenticationSend
            | fabrics::Kind::AuthenticationReceive
            | fabrics::Kind::Disconnect,
        )
        | None => Err(Status::INVALID_OPCODE.for_good()),
    }
}

fn perform(connection: &Connection, admin: &Admin, command: &Command) -> Result<Outcome, Status> {
    let controller = connection.controller();
    if controller.phase() != Phase::Enabled {
        return Err(Status::SEQUENCE.for_good());
    }
    let opcode = Opcode::from_byte(command.opcode()).ok_or(Status::INVALID_OPCODE.for_good())?;
    let reply = match opcode {
        Opcode::Identify => {
            return Ok(Outcome::Page(identify(connection, command)?.to_vec()));
        }
        Opcode::GetLogPage => return log(connection, admin, command).map(Outcome::Page),
        Opcode::AsyncEvent => {
            let told = admin.events.borrow_mut().request(command.id())?;
            if let Some((id, result)) = told {
                connection.answer(id, Reply::result(result));
            }
            return Ok(Outcome::Later);
        }
        Opcode::Abort => abort(connection, admin, command),
        Opcode::KeepAlive => Status::SUCCESS.into(),
        Opcode::GetFeatures => return get_feature(connection, admin, command),
        Opcode::SetFeatures => set_feature(connection, admin, command)?,
        // Queues over fabrics are made by connecting.
        Opcode::CreateSubmissionQueue
        | Opcode::CreateCompletionQueue
        | Opcode::DeleteSubmissionQueue
        | Opcode::DeleteCompletionQueue => return Err(Status::INVALID_OPCODE.for_good()),
    };
    Ok(Outcome::Reply(reply))
}

/// Bytes of a page that the host has room for: behind what there is it gets zeroes.
fn asked(command: &Command) -> Result<usize, Status> {
    let Some(Sgl::Transport { bytes }) = command.sgl() else {
        return Err(Status::SGL_TYPE.for_good());
    };
    if bytes == 0 || bytes > TRANSFER_BYTES_MAX {
        return Err(Status::SGL_LENGTH.for_good());
    }
    Ok(bytes as usize)
}

/// Section 5.17.
fn identify(connection: &Connection, command: &Command) -> Result<[u8; IDENTIFY_BYTES], Status> {
    let controller = connection.controller();
    let (what, set) = (command.dwords[10] & 0xff, command.dwords[11] >> 24);
    if what == CNS_CONTROLLER {
        return Ok(identify::controller(&ControllerFacts {
            id: controller.its.id,
            subsystem: &controller.its.subsystem,
            serial: controller.its.serial,
            discovery: controller.its.discovery.is_some(),
        }));
    }
    let id = command.namespace();
    let invalid = Status::INVALID_NAMESPACE.for_good();
    let exists = || connection.namespace(id).ok_or(invalid);
    let active = || {
        // Beyond the last there is nothing to list.
        if id >= u32::MAX - 1 {
            return Err(invalid);
        }
        let namespaces = connection.branch().visible_to(connection.host());
        Ok(identify::active(namespaces.iter().map(|its| its.id), id))
    };
    if controller.its.discovery.is_some() {
        return Err(Status::INVALID_FIELD.for_good());
    }
    match what {
        CNS_NAMESPACE if id == 0 || id > NAMESPACES_MAX => Err(invalid),
        // One that is not active: zeroes.
        CNS_NAMESPACE => Ok(connection
            .namespace(id)
            .map_or([0; IDENTIFY_BYTES], |its| identify::namespace(&its.facts()))),
        CNS_ACTIVE_NAMESPACES => active(),
        CNS_NAMESPACE_DESCRIPTORS => Ok(identify::descriptors(exists()?.facts().uuid)),
        CNS_NAMESPACE_OF_SET if set == 0 => exists().map(|_| identify::command_set()),
        CNS_CONTROLLER_OF_SET if set == 0 => Ok(identify::command_set()),
        CNS_ACTIVE_OF_SET if set == 0 => active(),
        _ => Err(Status::INVALID_FIELD.for_good()),
    }
}

/// Section 5.16.
fn log(connection: &Connection, admin: &Admin, command: &Command) -> Result<Vec<u8>, Status> {
    let page = command.dwords[10].to_le_bytes()[0];
    let keep = command.dwords[10] & 1 << 15 != 0;
    let dwords = u64::from(command.dwords[10] >> 16) | u64::from(command.dwords[11] & 0xffff) << 16;
    let bytes = (dwords + 1) * 4;
    let controller = connection.controller();
    let invalid = Err(Status::INVALID_LOG_PAGE.for_good());
    let mut all = match (page, &controller.its.discovery) {
        (log_page::DISCOVERY, Some(port)) => {
            let subsystems = port.subsystems_for(connection.host());
            let names = subsystems.names.iter().map(String::as_str);
            log_page::discovery(controller.its.at, names, subsystems.generation)
        }
        (_, Some(_)) | (log_page::DISCOVERY, None) => return invalid,
        (log_page::ERRORS, None) => log_page::errors().to_vec(),
        (log_page::HEALTH, None) => health(connection, admin).to_vec(),
        (log_page::FIRMWARE, None) => log_page::firmware().to_vec(),
        (log_page::CHANGED_NAMESPACES, None) => {
            log_page::changed_namespaces(&admin.events.borrow().changed()).to_vec()
        }
        (log_page::COMMANDS, None) => log_page::commands().to_vec(),
        (_, None) => return invalid,
    };
    let from = usize::try_from(command.quad(12)).ok().filter(|from| *from <= all.len());
    let from = from.ok_or(Status::INVALID_FIELD.for_good())?;
    // The length stands in the command and in its data pointer.
    if bytes != asked(command)? as u64 {
        return Err(Status::SGL_LENGTH.for_good());
    }
    if page == log_page::CHANGED_NAMESPACES && !keep {
        admin.events.borrow_mut().changes_are_known();
    }
    Ok(all.split_off(from))
}

/// Of all namespaces that the host sees.
fn health(connection: &Connection, admin: &Admin) -> [u8; 512] {
    let seen = connection.branch().visible_to(connection.host());
    let done: Counters = seen.iter().map(|its| its.counters()).sum();
    log_page::health(&done, connection.reactor().now().since(admin.since).as_secs())
}

/// Section 5.1. Requests for events wait long; other commands are done before it pays.
fn abort(connection: &Connection, admin: &Admin, command: &Command) -> Reply {
    let [queue, id] = command::words(command.dwords[10]);
    if queue == 0 && admin.events.borrow_mut().abort(id) {
        connection.answer(id, Status::ABORTED.into());
        return Reply::result(0_u32);
    }
    Reply::result(NOT_ABORTED)
}

/// Section 5.15: what is so now; hosts have nothing else to select from (ONCS).
fn get_feature(
    connection: &Connection,
    admin: &Admin,
    command: &Command,
) -> Result<Outcome, Status> {
    let controller = connection.controller();
    let feature = command.dwords[10] & 0xff;
    let value = match feature {
        FEATURE_EVENTS => admin.events.borrow().wanted(),
        FEATURE_KEEP_ALIVE => keep_alive_ms(connection),
        _ if controller.its.discovery.is_some() => return Err(Status::INVALID_FIELD.for_good()),
        FEATURE_ARBITRATION
        | FEATURE_POWER
        | FEATURE_TEMPERATURE
        | FEATURE_ERROR_RECOVERY
        | FEATURE_ATOMICITY => 0,
        FEATURE_WRITE_CACHE => 1,
        FEATURE_QUEUES => queues(controller.allocated_queues()),
        FEATURE_HOST if command.dwords[11] & EXTENDED_HOST != 0 => {
            return Ok(Outcome::Page(controller.its.host.id.to_vec()));
        }
        _ => return Err(Status::INVALID_FIELD.for_good()),
    };
    Ok(Outcome::Reply(Reply::result(value)))
}

/// Section 5.27.
fn set_feature(connection: &Connection, admin: &Admin, command: &Command) -> Result<Reply, Status> {
    if command.dwords[10] & SAVE != 0 {
        return Err(Status::FEATURE_NOT_SAVEABLE.for_good());
    }
    let controller = connection.controller();
    let value = command.dwords[11];
    match command.dwords[10] & 0xff {
        FEATURE_EVENTS => {
            let told = admin.events.borrow_mut().set_wanted(value);
            if let Some((id, result)) = told {
                connection.answer(id, Reply::result(result));
            }
            Ok(Status::SUCCESS.into())
        }
        // It is agreed on when the admin queue is connected.
        FEATURE_KEEP_ALIVE if value == keep_alive_ms(connection) => Ok(Status::SUCCESS.into()),
        FEATURE_QUEUES if controller.its.discovery.is_none() => {
            let [submission, completion] = command::words(value);
            if submission == u16::MAX || completion == u16::MAX {
                return Err(Status::INVALID_FIELD.for_good());
            }
            let allocated = controller.allocate_queues([submission + 1, completion + 1])?;
            Ok(Reply::result(queues(allocated)))
        }
        FEATURE_WRITE_CACHE if value & 1 != 0 => Ok(Status::SUCCESS.into()),
        FEATURE_ARBITRATION
        | FEATURE_POWER
        | FEATURE_TEMPERATURE
        | FEATURE_ERROR_RECOVERY
        | FEATURE_WRITE_CACHE
        | FEATURE_ATOMICITY
        | FEATURE_KEEP_ALIVE
        | FEATURE_HOST => Err(Status::FEATURE_NOT_CHANGEABLE.for_good()),
        _ => Err(Status::INVALID_FIELD.for_good()),
    }
}

fn keep_alive_ms(connection: &Connection) -> u32 {
    let keep_alive = connection.controller().its.keep_alive.unwrap_or_default();
    u32::try_from(keep_alive.as_millis()).unwrap_or(u32::MAX)
}

/// Number of Queues (section 5.27.1.5), from 0 for one.
fn queues([submission, completion]: [u16; 2]) -> u32 {
    u32::from(submission - 1) | u32::from(completion - 1) << 16
}
