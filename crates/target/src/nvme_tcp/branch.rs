//! A subsystem as it lives on one reactor: its namespaces there, and the connections that are
//! served there. Each reactor of a subsystem has all of its namespaces.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_reactor::wait_list::WaitList;

use crate::export::PartStatus;
use crate::nvme_tcp::connection::Connection;
use crate::nvme_tcp::namespace::{Namespace, is_allowed};

/// How often connections are looked at for hosts that are late, and counters told to others.
pub(crate) const WATCH_EVERY: Duration = Duration::from_millis(500);

pub(crate) struct Branch {
    reactor: Reactor,
    namespaces: RefCell<BTreeMap<u32, Rc<Namespace>>>,
    /// Those that were here before: since when they had power.
    gone: RefCell<BTreeMap<u32, Option<PowerCycle>>>,
    connections: RefCell<Vec<Rc<Connection>>>,
    closing: Cell<bool>,
    left: WaitList,
    /// A task does, as long as there are connections.
    watches: Cell<bool>,
}

impl Branch {
    pub(crate) fn new(reactor: &Reactor) -> Rc<Branch> {
        Rc::new(Branch {
            reactor: reactor.clone(),
            namespaces: RefCell::default(),
            gone: RefCell::default(),
            connections: RefCell::default(),
            closing: Cell::new(false),
            left: WaitList::default(),
            watches: Cell::new(false),
        })
    }

    pub(crate) fn reactor(&self) -> &Reactor {
        &self.reactor
    }

    /// `None`: there is none of this number that the host may see.
    pub(crate) fn namespace(&self, id: u32, host: &str) -> Option<Rc<Namespace>> {
        let namespaces = self.namespaces.borrow();
        namespaces.get(&id).filter(|its| its.is_visible_to(host)).cloned()
    }

    /// Those that the host may see, in order.
    pub(crate) fn visible_to(&self, host: &str) -> Vec<Rc<Namespace>> {
        let namespaces = self.namespaces.borrow();
        namespaces.values().filter(|its| its.is_visible_to(host)).cloned().collect()
    }

    /// One that was here before, and may have lost since what was not flushed, is not gone on with
    /// over a connection of before.
    pub(crate) fn add(&self, namespace: Rc<Namespace>) {
        let had = self.gone.borrow_mut().remove(&namespace.id);
        if had.is_some_and(|power| power.is_none() || power != namespace.power) {
            let all = self.connections.borrow();
            let its = all.iter().filter(|its| namespace.is_visible_to(its.host()));
            its.for_each(|its| its.cut());
        }
        let before = self.namespaces.borrow_mut().insert(namespace.id, namespace);
        assert!(before.is_none(), "a number is given once");
    }

    /// Takes a namespace out; returns when nothing is done on it any more.
    pub(crate) async fn remove(&self, id: u32) {
        let Some(namespace) = self.namespaces.borrow_mut().remove(&id) else { return };
        self.gone.borrow_mut().insert(id, namespace.power);
        namespace.rest().await;
    }

    /// Its volume may have grown.
    pub(crate) async fn look(&self, id: u32) {
        let Some(namespace) = self.namespaces.borrow().get(&id).cloned() else { return };
        namespace.disk.volume().look().await;
    }

    /// True: it was another number.
    pub(crate) fn set_atomic_bytes(&self, id: u32, bytes: u32) -> bool {
        let namespaces = self.namespaces.borrow();
        namespaces.get(&id).is_some_and(|its| its.set_atomic_bytes(bytes))
    }

    /// Who may see it from now on. Returns when nothing is done on it any more that was begun
    /// before.
    pub(crate) async fn set_hosts(&self, id: u32, hosts: Vec<String>) {
        let Some(namespace) = self.namespaces.borrow().get(&id).cloned() else { return };
        namespace.set_hosts(hosts).await;
    }

    /// What was done on a namespace was told to whoever asked for it.
    pub(crate) fn told(&self, id: u32) {
        if let Some(namespace) = self.namespaces.borrow().get(&id) {
            namespace.disk.told();
        }
    }

    /// Tells these hosts that a namespace came, went or has changed. All reactors know of that by
    /// now: a host looks at once, on whichever queue it likes.
    pub(crate) fn announce(&self, id: u32, hosts: &[String]) {
        for connection in self.connections.borrow().iter() {
            if is_allowed(hosts, connection.host()) {
                connection.namespace_changed(id);
            }
        }
    }

    /// Looks at what is there, once.
    fn look_after(&self) {
        for namespace in self.namespaces.borrow().values() {
            namespace.publish();
        }
        let now = self.reactor.now();
        self.connections.borrow().iter().for_each(|its| its.cut_if_late(now));
    }

    /// False: it takes no more.
    pub(crate) fn join(self: &Rc<Self>, connection: Rc<Connection>) -> bool {
        let takes = !self.closing.get();
        if takes {
            self.connections.borrow_mut().push(connection);
            if !self.watches.replace(true) {
                self.reactor.spawn(watch(Rc::downgrade(self), self.reactor.clone()));
            }
        }
        takes
    }

    pub(crate) fn leave(&self, connection: &Rc<Connection>) {
        self.connections.borrow_mut().retain(|its| !Rc::ptr_eq(its, connection));
        self.left.wake_all(&self.reactor);
    }

    /// `None`: there is no such namespace.
    pub(crate) fn status(&self, id: u32) -> Option<PartStatus> {
        let namespace = self.namespaces.borrow().get(&id).cloned()?;
        let connections = self.connections.borrow();
        let sees = |its: &&Rc<Connection>| namespace.is_visible_to(its.host());
        let connections = connections.iter().filter(sees).count();
        Some(PartStatus::of(&namespace.disk, connections > 0, connections))
    }

    /// Takes no more connections and cuts those that are there; returns when nothing is under way
    /// on any.
    pub(crate) async fn close(&self) {
        self.closing.set(true);
        self.connections.borrow().iter().for_each(|its| its.cut());
        self.left.until(&self.reactor, || self.connections.borrow().is_empty()).await;
    }
}

/// Looks after a branch until its last connection has left.
async fn watch(branch: Weak<Branch>, reactor: Reactor) {
    loop {
        reactor.sleep(WATCH_EVERY).await;
        let Some(branch) = branch.upgrade() else { return };
        branch.look_after();
        if branch.connections.borrow().is_empty() {
            branch.watches.set(false);
            return;
        }
    }
}
