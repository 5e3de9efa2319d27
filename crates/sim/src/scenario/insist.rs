//! Losses past what the level bears that operators take (`--force`): nobody can read what the
//! journal has, or who has it is away. What was acknowledged is there afterwards, or an error.

use ashlar_format::units::StripeIndex;

use super::{Phase, Scenario, Start};
use crate::drive::{BLOCK_BYTES, SECTOR_BYTES, SimDrive};
use crate::inspect;
use crate::workload::hot_stripes;

/// Rows of so many stripes at most: of wide arrays with many, a start looks at each of them.
const STRIPES_MAX: usize = 3;

impl Scenario {
    /// Between two lives: members are away, as many as the array bears at most; of others blocks
    /// of the journal cannot be read, and rows that may have been half stored. Now and then what
    /// could not be read before can be read again.
    pub(super) fn lose_past_the_limit(&mut self) {
        if self.losses.chance(1, 4) {
            let mut world = self.world.borrow_mut();
            world.note(|| "all can be read again".into());
            world.drives.iter_mut().for_each(|drive| drive.latent.clear());
        }
        let members = self.fleet.borrow().slots.clone();
        for _ in 0..self.losses.below(3) {
            let index = self.losses.index(members.len());
            if self.fleet.borrow().can_without(index) {
                self.world.borrow_mut().kill(members[index]);
            }
        }
        for drive in members {
            self.lose_blocks(drive);
        }
    }

    fn lose_blocks(&mut self, drive: u32) {
        if self.losses.chance(1, 2) {
            return;
        }
        let areas = self.plan.areas();
        let layout = self.plan.geometry.layout();
        let newest = inspect::newest(self.world.borrow().drives.iter());
        let stripes = newest.map_or(0, |newest| newest.stripes.get());
        let world = &mut *self.world.borrow_mut();
        let drive: &mut SimDrive = world.drive(drive);
        let mut lost = Vec::new();
        let one_in = [2, 8, 64][self.losses.index(3)];
        for at in areas.journal.range().step_by(BLOCK_BYTES) {
            if drive.block(at).is_some() && self.losses.chance(1, one_in) {
                lost.push(at);
            }
        }
        let one_in = [2, 4, 16][self.losses.index(3)];
        for stripe in hot_stripes(&self.plan, stripes).into_iter().take(STRIPES_MAX) {
            for row in (0..layout.chunk_bytes).step_by(BLOCK_BYTES) {
                if self.losses.chance(1, one_in) {
                    lost.push(areas.data.offset + layout.member_offset(StripeIndex(stripe), row));
                }
            }
        }
        let sectors = lost.into_iter().map(|at| at / SECTOR_BYTES as u64 + self.losses.below(8));
        drive.latent.extend(sectors);
    }

    /// Whether blocks of journals cannot be read: what is void may be so in none but these.
    pub(super) fn have_journals_gaps(&self) -> bool {
        let journal = self.plan.areas().journal;
        let has_gap = |drive: &SimDrive| drive.is_latent(journal.offset, journal.len);
        self.plan.insists && self.world.borrow().drives.iter().any(has_gap)
    }

    /// Those that were away are back, and all is read once more.
    pub(super) fn come_back_after_force(&mut self) {
        self.all_return();
        self.given_up = false;
        self.live(Start::Assemble, Phase::PastLimit);
    }
}
