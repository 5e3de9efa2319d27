//! A member that takes a batch.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::units::MemberIndex;

use crate::member::Member;

#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) member: MemberIndex,
    pub(super) drive: Rc<Drive>,
    pub(super) drive_uuid: [u8; 16],
    /// Where its ring begins.
    pub(super) ring: u64,
    /// The share it takes of a batch that is divided: its place in its group.
    pub(super) share: u8,
}

impl Target {
    /// Member `index`, in groups of `group`; `None` if it cannot take batches that end at `end` of
    /// the ring.
    pub(super) fn of(list: &[Member], index: usize, group: usize, end: u64) -> Option<Target> {
        let member = &list[index];
        let drive = member.keeps_metadata().filter(|_| end <= member.areas.journal.len)?.clone();
        let (drive_uuid, ring) = (member.drive_uuid, member.areas.journal.offset);
        let share = u8::try_from(index % group).expect("at most 64 in a group");
        Some(Target { member: MemberIndex::new(index), drive, drive_uuid, ring, share })
    }
}
