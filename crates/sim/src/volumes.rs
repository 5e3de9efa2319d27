//! What the volume table may say: a change that was answered is there, one that failed or was under
//! way at the end of a life may be.

use std::collections::BTreeMap;

use ashlar_format::array_superblock::MemberState;
use ashlar_raid::status::{ArrayStatus, MemberStatus};

/// Bytes of a volume; `None`: there is no such volume.
pub type Extent = Option<u64>;

/// The states that each volume may be found in.
#[derive(Debug, Default)]
pub struct Volumes {
    may_be: BTreeMap<&'static str, Vec<Extent>>,
    uuids_issued: u32,
}

impl Volumes {
    /// For a volume, so that it is told from one that had its name before.
    pub fn new_uuid(&mut self) -> [u8; 16] {
        self.uuids_issued += 1;
        let mut uuid = [5; 16];
        uuid[..4].copy_from_slice(&self.uuids_issued.to_le_bytes());
        uuid
    }

    /// From now on it may also be this.
    pub fn change_begins(&mut self, name: &'static str, then: Extent) {
        self.may_be.entry(name).or_insert_with(|| vec![None]).push(then);
    }

    /// It was answered: it is this.
    pub fn changed(&mut self, name: &'static str, then: Extent) {
        self.may_be.insert(name, vec![then]);
    }

    /// The array was stopped while it served these: no change that failed is left anywhere.
    pub fn are(&mut self, served: impl Fn(&str) -> Extent) {
        self.may_be.iter_mut().for_each(|(name, may_be)| *may_be = vec![served(name)]);
    }

    /// Verifies what a start found. `is_settled`: no member that is away may know otherwise.
    pub fn found(&mut self, look: impl Fn(&str) -> Extent, is_settled: bool) -> Result<(), String> {
        for (name, may_be) in &mut self.may_be {
            let found = look(name);
            if !may_be.contains(&found) {
                return Err(format!("volume {name} is {found:?}, and may be {may_be:?}"));
            }
            if is_settled {
                *may_be = vec![found];
            }
        }
        Ok(())
    }
}

/// Whether nobody is away who is believed, and may have volumes that nobody here has heard of.
pub fn are_known_to_all(status: &ArrayStatus) -> bool {
    let may_know = |its: &MemberStatus| its.drive.is_none() && its.state == MemberState::Trusted;
    !status.members.iter().any(may_know)
}
