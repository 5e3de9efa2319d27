//! What was begun and could not be finished. A batch of the journal says what has to be done after
//! a crash; it stays in the ring until that is done now.
//!
//! | begun | until it is finished | finished when |
//! |---|---|---|
//! | stripes become zero | torn: they read as zeroes, and nothing is put there | they are zero |
//! | regions are forgotten | without a batch they are an error | the members know of it |
//! | stripes get a new shape | the array stops | it is started again |
//! | a replay | torn, and they take no writes | started with more members, or by force with all |
//!
//! Nothing behind the oldest of them leaves the ring: when that is full, writers hear why.

use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::range_lock::Mode;

use crate::array::Array;
use crate::error::ArrayError;
use crate::pending::Hold;
use crate::stored::{Begun, Kept};

impl Array {
    /// The caller holds the stripes, or nobody else uses them yet.
    pub(crate) fn keep(&self, begun: Begun, holds: Vec<Hold>, error: ArrayError) {
        let torn = match &begun {
            Begun::Zeroing { stripes, .. } => stripes.clone(),
            Begun::Replay { stripe } => stripe.0..stripe.0 + 1,
            Begun::Forgetting { .. } | Begun::Moving => 0..0,
        };
        for stripe in torn.map(StripeIndex) {
            self.torn_stripes.insert(stripe);
            self.journal.pending.borrow_mut().bar(stripe);
        }
        if let Begun::Zeroing { stripes, sequence } = &begun {
            // What was there is not read again, though it may still stand on members.
            self.is_zero(stripes, *sequence);
        }
        self.kept.borrow_mut().push(Rc::new(Kept { begun, holds, error }));
    }

    /// Whether the stripe takes no writes: what is known of it is not enough to go on.
    pub(crate) fn is_stranded(&self, stripe: StripeIndex) -> bool {
        self.is_any_stranded(&(stripe.0..stripe.0 + 1))
    }

    /// The same of any of these.
    pub(crate) fn is_any_stranded(&self, stripes: &Range<u64>) -> bool {
        let is_it = |one: &Rc<Kept>| match one.begun {
            Begun::Replay { stripe } => stripes.contains(&stripe.0),
            Begun::Zeroing { .. } | Begun::Forgetting { .. } | Begun::Moving => false,
        };
        self.torn_stripes.next_in(stripes).is_some() && self.kept.borrow().iter().any(is_it)
    }

    /// Whether this member, if it was absent at the start, may have what a replay is known to have
    /// lacked. (Of batches of which not even the header could be read, nothing is known.)
    pub(crate) fn may_bring_batches(&self, index: MemberIndex) -> bool {
        let was_asked = self.journal.asked_stale.get() & 1 << index.0 != 0;
        let lacks = |one: &Rc<Kept>| matches!(one.begun, Begun::Replay { .. });
        !was_asked && self.kept.borrow().iter().any(lacks)
    }

    /// Whether the stripe is zeroes but for what is pending, whatever stands on its members.
    pub(crate) fn becomes_zero(&self, stripe: StripeIndex) -> bool {
        let has = |begun: &Begun| match begun {
            Begun::Zeroing { stripes, .. } => stripes.contains(&stripe.0),
            Begun::Forgetting { .. } | Begun::Moving | Begun::Replay { .. } => false,
        };
        self.torn_stripes.contains(stripe) && self.kept.borrow().iter().any(|one| has(&one.begun))
    }

    /// Whether a member that is away may show what one of these stripes was before it was
    /// forgotten, and no batch says that it is zero.
    pub(crate) fn is_half_forgotten(&self, those: &Range<u64>) -> bool {
        let has = |one: &Rc<Kept>| match &one.begun {
            Begun::Forgetting { stripes } => {
                one.holds.is_empty() && stripes.start < those.end && those.start < stripes.end
            }
            Begun::Zeroing { .. } | Begun::Moving | Begun::Replay { .. } => false,
        };
        self.kept.borrow().iter().any(has)
    }

    /// Why the ring cannot move on, whatever else is put in place; `None`: it can.
    pub(crate) fn blocked(&self) -> Option<ArrayError> {
        let kept = self.kept.borrow();
        let is_oldest = |one: &&Rc<Kept>| one.holds.iter().any(|hold| self.journal.is_oldest(hold));
        kept.iter().find(is_oldest).map(|one| one.error)
    }

    /// Finishes what can be by now. An error: something is left. The caller holds no stripe and no
    /// regions.
    pub(crate) async fn finish_kept(&self) -> Result<(), ArrayError> {
        let kept = self.kept.borrow().clone();
        let mut result = Ok(());
        for one in kept {
            let finished = match &one.begun {
                Begun::Zeroing { stripes, sequence } => {
                    self.zero_again(&one, stripes, *sequence).await
                }
                Begun::Forgetting { .. } => self.forget_again().await,
                Begun::Moving | Begun::Replay { .. } => Err(one.error),
            };
            match finished {
                Ok(()) => self.let_go(one),
                Err(error) => result = Err(error),
            }
        }
        result
    }

    async fn zero_again(
        &self,
        kept: &Rc<Kept>,
        stripes: &Range<u64>,
        sequence: u64,
    ) -> Result<(), ArrayError> {
        let _regions = self.hold_regions().await;
        let _touched = self.touch(StripeIndex(stripes.start));
        let _locks = self.lock_stripes(stripes.clone(), Mode::Exclusive).await;
        // Another may have been faster, and stripes have been written since.
        if !self.kept.borrow().iter().any(|one| Rc::ptr_eq(one, kept)) {
            return Ok(());
        }
        let mut all = stripes.clone().map(StripeIndex);
        if !all.all(|stripe| self.can_do_with(stripe, self.members.held(stripe))) {
            return Err(ArrayError::Lost);
        }
        if self.is_written(StripeIndex(stripes.start)) {
            self.zero_in_place(stripes.clone()).await?;
        }
        self.is_zero(stripes, sequence);
        for stripe in stripes.clone().map(StripeIndex) {
            self.torn_stripes.remove(stripe);
            self.journal.pending.borrow_mut().unbar(stripe);
        }
        Ok(())
    }

    /// Whether what is blank of these stripes is so after any restart.
    pub(crate) fn is_settled(&self, stripes: &Range<u64>) -> bool {
        self.written.is_settled() && !self.is_half_forgotten(stripes)
    }

    /// What is blank of these stripes is so after any restart, or it is an error.
    pub(crate) async fn finish_forgetting(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        if self.is_half_forgotten(&stripes) {
            return self.forget_again().await;
        }
        self.written.settle().await
    }

    /// The same of what was asked to be zero: nothing that was void before comes true after it.
    pub(crate) async fn finish_zeroing(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        if self.journal.is_half_void() {
            return self.forget_again().await;
        }
        self.finish_forgetting(stripes).await
    }

    async fn forget_again(&self) -> Result<(), ArrayError> {
        let _joins = self.members.hold_joins().await;
        self.written.settle().await?;
        self.members.fence_absent().await
    }

    fn let_go(&self, kept: Rc<Kept>) {
        self.kept.borrow_mut().retain(|one| !Rc::ptr_eq(one, &kept));
        drop(kept);
        self.journal.has_hope();
        self.journal.note_change();
    }
}
