//! The place of a member is given to a drive, its own or another.

use std::rc::Rc;

use ashlar_format::units::MemberIndex;

use crate::workload::Life;

/// A drive that was pulled, and is well, is plugged in again: not while it works on what it was
/// asked before, as the daemon does not lend it then.
pub async fn plug_in(life: &Rc<Life>, index: usize, drive: u32) {
    let dead = life.world.borrow_mut().drive(drive).dead;
    let busy = !life.world.borrow().in_flight(|its| its == drive).is_empty();
    if !dead && !busy {
        life.note(|| format!("member {index}: drive {drive} is plugged in again"));
        replace(life, index, drive).await;
    }
}

/// Whether it took the member's place.
pub async fn replace(life: &Rc<Life>, index: usize, drive: u32) -> bool {
    let handle = life.fleet.borrow().open(&life.reactor, drive);
    let uuid = life.fleet.borrow_mut().renew_uuid(drive);
    let replaced = life.array.replace_member(MemberIndex::new(index), handle, uuid).await;
    life.note(|| format!("member {index}: drive {drive}: {replaced:?}"));
    replaced.is_ok()
}
