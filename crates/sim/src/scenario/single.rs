//! The lives of a plan with a single fault: while the array serves or is stopped, or while it is
//! started after a power cut.

use super::{Phase, Scenario, Start};
use crate::faults::{Ending, Single, SingleFault, turn};
use crate::world::AtCompletion;

impl Single {
    pub(super) fn at_completion(self) -> AtCompletion {
        match self.what {
            SingleFault::Fail => AtCompletion::Fail,
            SingleFault::Death => AtCompletion::OwnDeath,
            SingleFault::Cut(_)
            | SingleFault::CutAndLose(_)
            | SingleFault::CutDegraded(_)
            | SingleFault::CutReturned(_) => AtCompletion::Dark,
        }
    }
}

impl Scenario {
    /// All lives. False if what the fault was to strike ended before it.
    pub fn single_fault(&mut self, single: Single) -> bool {
        self.live(Start::Create, Phase::Safety(Ending::CleanStop));
        // Who is lost first is not drawn with the loss.
        let first = turn(single.after + 1, self.plan.geometry.members);
        let is_away =
            matches!(single.what, SingleFault::CutDegraded(_) | SingleFault::CutReturned(_));
        if is_away || self.plan.spares {
            self.lose_drives(first, 1);
        }
        self.loss = single.what.loss();
        if single.in_start && !self.is_over() {
            self.live(Start::Assemble, Phase::Safety(Ending::PowerCut));
        }
        let reached = !self.is_over() && self.live_with(single);
        let loses = match single.what {
            SingleFault::CutAndLose(_) => true,
            SingleFault::CutDegraded(_) | SingleFault::CutReturned(_) => {
                turn(single.after + 2, 2) == 0
            }
            SingleFault::Fail | SingleFault::Cut(_) | SingleFault::Death => false,
        };
        if matches!(single.what, SingleFault::CutReturned(_)) {
            self.all_return();
        }
        if loses {
            self.lose_drives(first, usize::MAX);
        }
        if !self.is_over() {
            self.recover(Start::Assemble);
        }
        reached
    }

    /// The life in which it comes. False: it did not.
    fn live_with(&mut self, single: Single) -> bool {
        let ending =
            if single.what.loss().is_some() { Ending::PowerCut } else { Ending::CleanStop };
        let before = self.world.borrow().completions;
        if single.in_start {
            self.world.borrow_mut().plan(single.after, single.at_completion());
        } else {
            self.single = Some(single);
        }
        self.live(Start::Assemble, Phase::Safety(ending));
        let world = self.world.borrow();
        let is_up = world.up_after > before;
        match (single.in_start, is_up) {
            (true, true) => world.up_after >= before + single.after,
            (true, false) => world.completions >= before + single.after,
            (false, true) => world.completions >= world.up_after + single.after,
            (false, false) => false,
        }
    }
}
