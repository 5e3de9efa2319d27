//! Commands of the NVM command set, from beginning to end.
//!
//! Sections are of the NVM Command Set Specification 1.0.

use std::pin::pin;
use std::rc::Rc;

use ashlar_format::units::to_usize;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::nvme::command::{
    Command, DATASET_DEALLOCATE, DATASET_RANGE_BYTES, DATASET_RANGES_MAX, FORCE_UNIT_ACCESS, Nvm,
    Sgl, Status,
};
use ashlar_reactor::nvme::fabrics;

use crate::disk::Turn;
use crate::limits::{Toll, Wanted};
use crate::nvme_tcp::connection::{Capsule, Claim, Connection, Reply};
use crate::nvme_tcp::identify::{BLOCK_BYTES, TRANSFER_BYTES_MAX};
use crate::nvme_tcp::namespace::{Namespace, Passage};
use crate::request::{self, Operation, Permit, Request};

/// Of Flush: all namespaces.
pub(crate) const ALL_NAMESPACES: u32 = u32::MAX;
/// Bits of double word 0 for commands that belong together (FUSE).
const FUSED: u32 = 0b11 << 8;

/// A byte range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    offset: u64,
    len: u64,
}

/// Data from the host, held as long as this lives; and room for as much as is wanted beside it.
struct Given {
    data: Buffers,
    _claim: Claim,
}

/// Does a command.
pub(crate) async fn execute(
    connection: &Rc<Connection>,
    command: &Command,
    capsule: Capsule,
) -> Reply {
    perform(connection, command, capsule).await.unwrap_or_else(Reply::from)
}

async fn perform(
    connection: &Rc<Connection>,
    command: &Command,
    capsule: Capsule,
) -> Result<Reply, Status> {
    let Some(opcode) = Nvm::from_byte(command.opcode()) else {
        // Connect comes once, before this (Base 6.3).
        let is_connect = fabrics::Kind::of(command) == Some(fabrics::Kind::Connect);
        let status = if is_connect { Status::SEQUENCE } else { Status::INVALID_OPCODE };
        return Err(status.for_good());
    };
    if command.dwords[0] & FUSED != 0 {
        return Err(Status::INVALID_FIELD.for_good());
    }
    if opcode == Nvm::Flush && command.namespace() == ALL_NAMESPACES {
        return flush_all(connection).await;
    }
    let of = Of { connection, command, namespace: &find(connection, command)? };
    let wanted = || connection.is_served();
    match opcode {
        Nvm::Read => {
            let place = transfer(of.namespace, command)?;
            let mut turn = of.turn(Toll::Read(place.len), &wanted).await?;
            let memory = of.memory(&mut turn, place.len).await?;
            of.read(turn, place, memory).await
        }
        Nvm::Write => {
            let place = transfer(of.namespace, command)?;
            let mut turn = of.turn(Toll::Write(place.len), &wanted).await?;
            let given = of.given(&mut turn, capsule, (place.len, 0)).await?;
            of.write(turn, place, given).await
        }
        Nvm::Compare => {
            let place = transfer(of.namespace, command)?;
            let mut turn = of.turn(Toll::Read(place.len), &wanted).await?;
            // Room for both at a time: who had the one and waited for the other could wait for
            // its like for good.
            let given = of.given(&mut turn, capsule, (place.len, place.len)).await?;
            of.compare(turn, place, &given).await
        }
        Nvm::Flush => {
            let _passage = of.namespace.enter();
            do_on(of.namespace, Operation::Flush, Status::WRITE_FAULT).await
        }
        Nvm::WriteZeroes => {
            let place = place(of.namespace, command.quad(10), command.blocks())?;
            of.write_zeroes(place, &wanted).await
        }
        Nvm::DatasetManagement => {
            let (used, sent) = ranges_bytes(command)?;
            let given = given(connection, command, capsule, (sent, 0)).await?;
            of.check()?;
            of.deallocate(&given.data.slice(0..used), &wanted).await
        }
    }
}

/// A command, and what it is of.
struct Of<'a> {
    connection: &'a Rc<Connection>,
    command: &'a Command,
    namespace: &'a Rc<Namespace>,
}

impl<'a> Of<'a> {
    /// Whether the namespace is there still.
    fn check(&self) -> Result<(), Status> {
        let is_same = Rc::ptr_eq(&find(self.connection, self.command)?, self.namespace);
        if is_same { Ok(()) } else { Err(Status::INVALID_NAMESPACE.for_good()) }
    }

    /// Waits for its turn. Commands that move blocks do so before they hold anything that others of
    /// the connection could go on with: writes that have to wait stop no reads. Only Deallocate
    /// holds its ranges meanwhile, 4 KiB at most, since they say what it waits for. A namespace
    /// that is to go has everyone go on, and waits for that.
    async fn turn(&self, toll: Toll, wanted: Wanted<'a>) -> Result<Turn<'a>, Status> {
        let passage = self.namespace.enter_queue();
        let turn = self.namespace.disk.turn_while(wanted, toll).await.ok_or(Status::ABORTED)?;
        drop(passage);
        self.check()?;
        Ok(turn)
    }

    /// The data of one whose turn has come. For the host nobody here can be blamed.
    async fn given(
        &self,
        turn: &mut Turn<'_>,
        capsule: Capsule,
        lens: (u64, u64),
    ) -> Result<Given, Status> {
        let reactor = self.connection.reactor();
        let asked = reactor.turn_time();
        let given = given(self.connection, self.command, capsule, lens).await?;
        turn.was_idle(reactor.turn_time().since(asked));
        // The namespace may have gone while its data was on the way.
        self.check()?;
        Ok(given)
    }

    /// Memory for the data that one whose turn has come reads. It is the host that keeps it, by the
    /// answers that it does not fetch.
    async fn memory(&self, turn: &mut Turn<'_>, len: u64) -> Result<(Buffers, Claim), Status> {
        let (reactor, len) = (self.connection.reactor(), to_usize(len));
        let asked = reactor.turn_time();
        let claim = self.connection.claim(len).await.ok_or(Status::ABORTED)?;
        turn.was_idle(reactor.turn_time().since(asked));
        // The namespace may have gone while there was no room.
        self.check()?;
        Ok((reactor.buffer(len).into(), claim))
    }

    async fn read(
        &self,
        turn: Turn<'_>,
        Place { offset, .. }: Place,
        (into, claim): (Buffers, Claim),
    ) -> Result<Reply, Status> {
        let passage = self.namespace.enter();
        let read = Operation::Read { offset, into: into.clone() };
        do_in(turn, self.namespace, read, Status::UNRECOVERED_READ).await?;
        self.settle(&passage, Status::UNRECOVERED_READ).await?;
        Ok(Reply { status: Status::SUCCESS, result: 0, data: Some((into, claim)) })
    }

    async fn write(&self, turn: Turn<'_>, place: Place, given: Given) -> Result<Reply, Status> {
        let passage = self.namespace.enter();
        let write = Operation::Write { offset: place.offset, from: given.data.clone() };
        do_in(turn, self.namespace, write, Status::WRITE_FAULT).await?;
        self.settle(&passage, Status::WRITE_FAULT).await
    }

    async fn write_zeroes(&self, place: Place, wanted: Wanted<'a>) -> Result<Reply, Status> {
        let Place { offset, len } = place;
        let turn = self.turn(Toll::Write(0), wanted).await?;
        let passage = self.namespace.enter();
        let zeroes = Operation::WriteZeroes { offset, len };
        do_in(turn, self.namespace, zeroes, Status::WRITE_FAULT).await?;
        self.settle(&passage, Status::WRITE_FAULT).await
    }

    /// Makes durable what was written, or read, if the host wants that before the answer.
    async fn settle(&self, _passage: &Passage, failed: Status) -> Result<Reply, Status> {
        if self.command.dwords[12] & FORCE_UNIT_ACCESS == 0 {
            return Ok(Status::SUCCESS.into());
        }
        do_on(self.namespace, Operation::Flush, failed).await
    }

    async fn compare(
        &self,
        turn: Turn<'_>,
        Place { offset, .. }: Place,
        given: &Given,
    ) -> Result<Reply, Status> {
        let passage = self.namespace.enter();
        let there = Buffers::from(self.connection.reactor().buffer(given.data.len()));
        let read = Operation::Read { offset, into: there.clone() };
        do_in(turn, self.namespace, read, Status::UNRECOVERED_READ).await?;
        self.settle(&passage, Status::UNRECOVERED_READ).await?;
        let equal = there.pieces().len() == given.data.pieces().len()
            && there.pieces().iter().zip(given.data.pieces()).all(|(a, b)| a.bytes() == b.bytes());
        if equal { Ok(Status::SUCCESS.into()) } else { Err(Status::COMPARE_FAILED) }
    }

    /// Section 3.2.3: hints. Deallocating is the only one that is taken.
    async fn deallocate(&self, ranges: &Buffers, wanted: Wanted<'a>) -> Result<Reply, Status> {
        if self.command.dwords[11] & DATASET_DEALLOCATE == 0 {
            return Ok(Status::SUCCESS.into());
        }
        for at in (0..ranges.len()).step_by(DATASET_RANGE_BYTES) {
            let mut range = [0; DATASET_RANGE_BYTES];
            ranges.slice(at..at + DATASET_RANGE_BYTES).copy_to_slice(&mut range);
            let (block, blocks) = range_of(&range);
            if blocks == 0 {
                continue;
            }
            let Place { offset, len } = place(self.namespace, block, blocks)?;
            let turn = self.turn(Toll::Write(0), wanted).await?;
            let _passage = self.namespace.enter();
            let discard = Operation::Discard { offset, len };
            do_in(turn, self.namespace, discard, Status::WRITE_FAULT).await?;
            // Of a range that holds nothing there is nothing to wait for, and there may be many.
            self.connection.reactor().yield_now().await;
        }
        Ok(Status::SUCCESS.into())
    }
}

fn find(connection: &Connection, command: &Command) -> Result<Rc<Namespace>, Status> {
    // What came before its controller ended gets at nothing that was added after.
    if !connection.is_open() {
        return Err(Status::TRANSIENT_TRANSPORT);
    }
    let namespace = connection.namespace(command.namespace());
    namespace.ok_or(Status::INVALID_NAMESPACE.for_good())
}

/// The range of so many blocks from a block on, if the namespace has it.
fn place(namespace: &Namespace, block: u64, blocks: u32) -> Result<Place, Status> {
    within(namespace.disk.volume().bytes(), block, blocks)
}

fn within(bytes: u64, block: u64, blocks: u32) -> Result<Place, Status> {
    let offset = block.checked_mul(BLOCK_BYTES);
    let len = u64::from(blocks) * BLOCK_BYTES;
    let fits = |offset: &u64| offset.checked_add(len).is_some_and(|end| end <= bytes);
    let offset = offset.filter(fits).ok_or(Status::OUT_OF_RANGE.for_good())?;
    Ok(Place { offset, len })
}

/// The range of a command that moves data: as long as what its data pointer says.
fn transfer(namespace: &Namespace, command: &Command) -> Result<Place, Status> {
    let place = place(namespace, command.quad(10), command.blocks())?;
    if place.len > u64::from(TRANSFER_BYTES_MAX) {
        return Err(Status::INVALID_FIELD.for_good());
    }
    check_length(command, place.len)?;
    Ok(place)
}

fn check_length(command: &Command, len: u64) -> Result<(), Status> {
    match command.sgl().ok_or(Status::SGL_TYPE.for_good())? {
        Sgl::Transport { bytes } | Sgl::InCapsule { bytes, .. } if u64::from(bytes) == len => {
            Ok(())
        }
        Sgl::Transport { .. } | Sgl::InCapsule { .. } => Err(Status::SGL_LENGTH.for_good()),
    }
}

/// The data of a command, from its capsule or from the host; `beside`: of what else there shall be
/// room for.
async fn given(
    connection: &Rc<Connection>,
    command: &Command,
    capsule: Capsule,
    (len, beside): (u64, u64),
) -> Result<Given, Status> {
    check_length(command, len)?;
    match (command.sgl(), capsule) {
        (_, Capsule::Damaged) => Err(Status::TRANSIENT_TRANSPORT),
        (Some(Sgl::InCapsule { offset, .. }), Capsule::Data(data)) => {
            let end = offset.checked_add(len).filter(|end| *end <= data.len() as u64);
            let end = end.ok_or(Status::SGL_OFFSET.for_good())?;
            let data = data.slice(to_usize(offset)..to_usize(end));
            let claim = connection.claim(to_usize(beside)).await.ok_or(Status::ABORTED)?;
            Ok(Given { data, _claim: claim })
        }
        (Some(Sgl::Transport { bytes }), Capsule::None) => {
            let room = connection.claim(to_usize(len + beside)).await.ok_or(Status::ABORTED)?;
            let data = connection.fetch(command.id(), bytes).await?;
            Ok(Given { data, _claim: room })
        }
        (Some(_) | None, Capsule::None | Capsule::Data(_)) => Err(Status::SGL_TYPE.for_good()),
    }
}

/// Does one request on the volume that has not waited for a turn; `failed`: what its failure is
/// called.
async fn do_on(
    namespace: &Namespace,
    operation: Operation,
    failed: Status,
) -> Result<Reply, Status> {
    let turn = namespace.disk.turn(Toll::of(&operation)).await;
    do_in(turn, namespace, operation, failed).await
}

/// The same, of one whose turn has come.
async fn do_in(
    turn: Turn<'_>,
    namespace: &Namespace,
    operation: Operation,
    failed: Status,
) -> Result<Reply, Status> {
    let request = Request { operation, permit: Permit::new(0) };
    match pin!(namespace.disk.serve_in(turn, request)).await.status {
        request::Status::Done => Ok(Status::SUCCESS.into()),
        request::Status::Failed => Err(failed),
        request::Status::NoSpace => Err(Status::CAPACITY_EXCEEDED),
        request::Status::Unsupported => Err(Status::INVALID_OPCODE.for_good()),
    }
}

async fn flush_all(connection: &Rc<Connection>) -> Result<Reply, Status> {
    let visible = connection.branch().visible_to(connection.host());
    let ids: Vec<u32> = visible.iter().map(|its| its.id).collect();
    drop(visible);
    for id in ids {
        // It may have gone while another was flushed.
        let Some(namespace) = connection.namespace(id) else { continue };
        let _passage = namespace.enter();
        do_on(&namespace, Operation::Flush, Status::WRITE_FAULT).await?;
    }
    Ok(Status::SUCCESS.into())
}

/// How many bytes of ranges there are, and how many come: hosts may send room for all that there
/// can be, and Linux does.
fn ranges_bytes(command: &Command) -> Result<(usize, u64), Status> {
    let [count, _, _, _] = command.dwords[10].to_le_bytes();
    let used = (usize::from(count) + 1) * DATASET_RANGE_BYTES;
    let sent = match command.sgl().ok_or(Status::SGL_TYPE.for_good())? {
        Sgl::Transport { bytes } | Sgl::InCapsule { bytes, .. } => bytes as usize,
    };
    if !(used..=DATASET_RANGE_BYTES * DATASET_RANGES_MAX).contains(&sent) {
        return Err(Status::SGL_LENGTH.for_good());
    }
    Ok((used, sent as u64))
}

/// First block and count (figure 45: attributes, length, start).
fn range_of(range: &[u8; DATASET_RANGE_BYTES]) -> (u64, u32) {
    let [_, _, _, _, a, b, c, d, start @ ..] = *range;
    (u64::from_le_bytes(start), u32::from_le_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    //! Goal: a command reaches what it names, and nothing beyond the end.
    //! Method: both sides of each bound; entries written out by hand.

    use super::*;

    #[test]
    fn ranges_end_with_the_volume() {
        assert_eq!(within(4096, 0, 8), Ok(Place { offset: 0, len: 4096 }));
        assert_eq!(within(4096, 7, 1), Ok(Place { offset: 3584, len: 512 }));
        let beyond = Err(Status::OUT_OF_RANGE.for_good());
        for (block, blocks) in [(0, 9), (8, 1), (1, 8), (u64::MAX, 1), (u64::MAX / 512, 1)] {
            assert_eq!(within(4096, block, blocks), beyond, "{block} {blocks}");
        }
    }

    #[test]
    fn lengths_are_those_of_the_data_pointer() {
        let read = Command::read(1, 0, 8);
        assert_eq!(check_length(&read, 4096), Err(Status::SGL_TYPE.for_good()));
        let read = read.with_sgl(Sgl::Transport { bytes: 4096 });
        assert_eq!(check_length(&read, 4096), Ok(()));
        assert_eq!(check_length(&read, 4608), Err(Status::SGL_LENGTH.for_good()));
    }

    #[test]
    fn ranges_may_come_with_room_for_more() {
        let sized =
            |bytes| ranges_bytes(&Command::deallocate(1, 2).with_sgl(Sgl::Transport { bytes }));
        assert_eq!(sized(32), Ok((32, 32)));
        assert_eq!(sized(4096), Ok((32, 4096)));
        for bytes in [0, 31, 4097] {
            assert_eq!(sized(bytes), Err(Status::SGL_LENGTH.for_good()), "{bytes}");
        }
    }

    #[test]
    fn ranges_are_read_as_they_are_written() {
        let range = [9, 9, 9, 9, 8, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0];
        assert_eq!(range_of(&range), (0x201, 8));
    }
}
