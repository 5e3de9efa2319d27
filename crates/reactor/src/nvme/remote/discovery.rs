//! What a host offers, by its discovery controller (Base 5.16.1.23 and 3.1.2.3).

use std::time::Duration;

use super::association::{call, connect, enable};
use super::wire::Payload;
use super::{Target, Trouble};
use crate::nvme::command::Command;
use crate::nvme::fabrics::{
    DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, LOG_DISCOVERY, SUBTYPE_NVME, TRANSPORT_TCP,
    nqn_from,
};
use crate::nvme::pdu;

/// More are not asked for.
const ENTRIES_MAX: u64 = 256;
const HEADER: usize = size_of::<DiscoveryHeader>();
const ENTRY: usize = size_of::<DiscoveryEntry>();
/// Times that the list may change while it is read.
const ATTEMPTS_MAX: u32 = 3;
/// Bytes of the log that are asked for at a time.
const PIECE: usize = 4096;

/// A subsystem, and a way to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub address: String,
    pub port: String,
    /// Its NQN.
    pub subsystem: String,
}

/// What can be reached over TCP. Of `target` only the host, and who asks, matter.
pub fn offers(target: &Target) -> Result<Vec<Offer>, Trouble> {
    // The connection ends with the questions: nobody has to keep it alive.
    let mut joined = connect(target, DISCOVERY_NQN, Duration::ZERO)?;
    enable(&mut joined.wire)?;
    for _ in 0..ATTEMPTS_MAX {
        let mut head = [0; HEADER];
        log_page(&mut joined, &mut head, 0)?;
        let header = pdu::header::<DiscoveryHeader>(&head).expect("all of it");
        let count = usize::try_from(header.entries.get().min(ENTRIES_MAX)).expect("few");
        let mut page = vec![0; count * ENTRY];
        // No more at once than any controller gives (MDTS).
        for (piece, at) in page.chunks_mut(PIECE).zip((HEADER as u64..).step_by(PIECE)) {
            log_page(&mut joined, piece, at)?;
        }
        log_page(&mut joined, &mut head, 0)?;
        let after = pdu::header::<DiscoveryHeader>(&head).expect("all of it");
        if after.generation == header.generation {
            return Ok(page.chunks_exact(ENTRY).filter_map(offer).collect());
        }
    }
    Err(Trouble::Absurd("its list changes all the time"))
}

fn log_page(
    joined: &mut super::association::Joined,
    page: &mut [u8],
    offset: u64,
) -> Result<(), Trouble> {
    let bytes = u32::try_from(page.len()).expect("few entries");
    let command = Command::get_log_page(LOG_DISCOVERY, 0, bytes, offset);
    call(&mut joined.wire, command, Payload::In(page), "the discovery log").map(|_| ())
}

fn offer(bytes: &[u8]) -> Option<Offer> {
    let entry = pdu::header::<DiscoveryEntry>(bytes)?;
    if entry.transport != TRANSPORT_TCP || entry.subtype != SUBTYPE_NVME {
        return None;
    }
    Some(Offer {
        address: text(&entry.address)?,
        port: text(&entry.service)?,
        subsystem: nqn_from(&entry.subsystem)?.to_owned(),
    })
}

/// ASCII without its padding, by spaces or zeroes; `None`: it is something else.
fn text(field: &[u8]) -> Option<String> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).ok()?.trim();
    let is_shown = |byte: u8| byte.is_ascii_graphic();
    (!text.is_empty() && text.bytes().all(is_shown)).then(|| text.to_owned())
}
