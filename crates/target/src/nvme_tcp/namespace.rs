//! A namespace as one reactor serves it: a volume with a number, and the hosts that may see it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_reactor::wait_list::WaitList;

use crate::disk::{Counters, Disk};
use crate::nvme_tcp::ExportSpec;
use crate::nvme_tcp::identify::{BLOCK_BYTES, NamespaceFacts};

/// What the parts of one export have done, as far as they have told each other: a host asks any one
/// of them for the sum. Told once a second, and not with each request.
#[derive(Default)]
pub(crate) struct Tally(Mutex<Vec<Counters>>);

impl Tally {
    pub(crate) fn new(parts: usize) -> Arc<Tally> {
        Arc::new(Tally(Mutex::new(vec![Counters::default(); parts])))
    }

    fn publish(&self, part: usize, counters: Counters) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = parts.get_mut(part) {
            *place = counters;
        }
    }

    fn total(&self) -> Counters {
        let parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.iter().copied().sum()
    }
}

pub(crate) struct Namespace {
    pub(crate) id: u32,
    pub(crate) disk: Disk,
    /// Writes up to so many bytes are there as a whole after a power cut, or not at all.
    atomic_bytes: Cell<u32>,
    pub(crate) power: Option<PowerCycle>,
    tally: Arc<Tally>,
    /// Which of its parts this is.
    part: usize,
    /// In order; none: any.
    hosts: RefCell<Vec<String>>,
    /// Held by all that is done on its volume since `hosts` were set.
    term: RefCell<Rc<()>>,
    /// The same of before, as far as something is done yet.
    former: RefCell<Vec<Rc<()>>>,
    under_way: Cell<u32>,
    idle: WaitList,
}

impl Namespace {
    /// `part`: which of those that `tally` is of.
    pub(crate) fn new(
        id: u32,
        disk: Disk,
        spec: &ExportSpec,
        (tally, part): (Arc<Tally>, usize),
    ) -> Rc<Namespace> {
        Rc::new(Namespace {
            id,
            disk,
            atomic_bytes: Cell::new(spec.atomic_bytes),
            power: spec.power,
            tally,
            part,
            hosts: RefCell::new(spec.hosts.clone()),
            term: RefCell::default(),
            former: RefCell::default(),
            under_way: Cell::new(0),
            idle: WaitList::default(),
        })
    }

    /// Lets other reactors know what was done here.
    pub(crate) fn publish(&self) {
        self.tally.publish(self.part, self.disk.counters());
    }

    /// What was done on it since it was offered.
    pub(crate) fn counters(&self) -> Counters {
        self.publish();
        self.tally.total()
    }

    pub(crate) fn is_visible_to(&self, host: &str) -> bool {
        is_allowed(&self.hosts.borrow(), host)
    }

    /// In order; none: any. Returns when nothing is done on its volume any more that was begun
    /// before; at once, if hosts were only let in.
    pub(crate) async fn set_hosts(&self, hosts: Vec<String>) {
        let had = self.hosts.replace(hosts);
        let all_stay = !had.is_empty() && had.iter().all(|host| self.is_visible_to(host));
        if all_stay && *self.hosts.borrow() != had {
            return;
        }
        self.former.borrow_mut().push(self.term.replace(Rc::default()));
        let is_over = || {
            let mut former = self.former.borrow_mut();
            former.retain(|term| Rc::strong_count(term) > 1);
            former.is_empty()
        };
        self.idle.until(self.disk.reactor(), is_over).await;
    }

    pub(crate) fn facts(&self) -> NamespaceFacts {
        let volume = self.disk.volume();
        NamespaceFacts {
            blocks: volume.bytes() / BLOCK_BYTES,
            uuid: volume.uuid(),
            discard_bytes: volume.discard_bytes(),
            atomic_bytes: self.atomic_bytes.get(),
            power: self.power,
        }
    }

    /// True: it was another number.
    pub(crate) fn set_atomic_bytes(&self, bytes: u32) -> bool {
        self.atomic_bytes.replace(bytes) != bytes
    }

    /// Something is done on its volume until what is returned is dropped.
    pub(crate) fn enter(self: &Rc<Self>) -> Passage {
        let mut passage = self.enter_queue();
        passage.term = Some(self.term.borrow().clone());
        passage
    }

    /// Something waits to be done, and is looked at once more before it is.
    pub(crate) fn enter_queue(self: &Rc<Self>) -> Passage {
        self.under_way.set(self.under_way.get() + 1);
        Passage { namespace: self.clone(), term: None }
    }

    /// Waits until nothing is done on its volume any more. No more may begin.
    pub(crate) async fn rest(&self) {
        self.disk.throttle().hurry();
        self.idle.until(self.disk.reactor(), || self.under_way.get() == 0).await;
        self.disk.throttle().calm();
    }
}

/// Whether a host is among those that are allowed, in order: all are, where none is named.
pub(crate) fn is_allowed(hosts: &[String], host: &str) -> bool {
    hosts.is_empty() || hosts.binary_search_by(|its| its.as_str().cmp(host)).is_ok()
}

pub(crate) struct Passage {
    namespace: Rc<Namespace>,
    term: Option<Rc<()>>,
}

impl Drop for Passage {
    fn drop(&mut self) {
        let its = &self.namespace;
        let left = its.under_way.get() - 1;
        its.under_way.set(left);
        let was_before =
            self.term.take().is_some_and(|term| !Rc::ptr_eq(&term, &its.term.borrow()));
        if left == 0 || was_before {
            its.idle.wake_all(its.disk.reactor());
        }
    }
}
