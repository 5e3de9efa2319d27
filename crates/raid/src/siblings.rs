//! What a drive asks its array about the others, before it is given up.

use std::ptr;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, Siblings};
use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::backend::Instant;

use crate::member::Member;
use crate::members::Members;

impl Members {
    pub(crate) fn introduce_all(self: &Rc<Self>) {
        self.list().iter().flat_map(|its| &its.drive).for_each(|its| self.introduce(its));
    }

    /// From now on a drive asks for its siblings before it is given up.
    pub(crate) fn introduce(self: &Rc<Self>, drive: &Drive) {
        let siblings: Rc<dyn Siblings> = self.clone();
        drive.introduce(Rc::downgrade(&siblings));
    }
}

impl Siblings for Members {
    fn stand_for(&self, drive: &Drive, fit: &dyn Fn(&Drive) -> bool) -> bool {
        let list = self.list();
        let is_fit = |its: &Rc<Drive>| !is_same(its, drive) && fit(its);
        let is_it = |member: &Member| member.drive.as_ref().is_some_and(|its| is_same(its, drive));
        let index = list.iter().position(is_it);
        let index = index.filter(|index| list[*index].state != MemberState::Stale);
        // It joins later, or is not believed: nobody needs it yet.
        let Some(index) = index else {
            return list.iter().filter_map(Member::alive).any(is_fit);
        };
        let held = |its: &Member| its.is_whole() && its.drive.as_ref().is_some_and(is_fit);
        let held: Vec<bool> = list.iter().map(held).collect();
        self.identity.layout().stands_for(&held, MemberIndex::new(index))
    }

    fn flushing_beside(&self, drive: &Drive) -> Vec<Rc<Drive>> {
        // Other reactors read what it shows.
        self.hide();
        let list = self.list();
        others(&list, drive).filter(|its| its.is_flushing()).cloned().collect()
    }

    fn ask_whether_they_answer(&self, drive: &Drive, since: Instant) {
        let list = self.list();
        let silent = others(&list, drive).filter(|its| !its.has_answered(since));
        silent.for_each(|its| its.ask_whether_it_answers());
    }
}

/// Those that answer.
fn others<'a>(list: &'a [Member], drive: &'a Drive) -> impl Iterator<Item = &'a Rc<Drive>> {
    list.iter().filter_map(Member::alive).filter(|its| !is_same(its, drive))
}

fn is_same(one: &Rc<Drive>, other: &Drive) -> bool {
    ptr::eq(Rc::as_ptr(one), other)
}
