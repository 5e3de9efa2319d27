//! A subsystem as it lives on one reactor: its namespaces there, and the connections that are
//! served there. Each reactor of a subsystem has all of its namespaces.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::traffic;
use ashlar_reactor::wait_list::WaitList;

use crate::disk::{Counters, Trouble};
use crate::nvme_tcp::connection::Connection;
use crate::nvme_tcp::namespace::Namespace;

/// What one part of an export does.
pub(crate) struct PartStatus {
    pub(crate) connections: u16,
    pub(crate) counters: Counters,
    pub(crate) traffic: traffic::Report,
    pub(crate) trouble: Option<Trouble>,
}

pub(crate) struct Branch {
    reactor: Reactor,
    namespaces: RefCell<BTreeMap<u32, Rc<Namespace>>>,
    connections: RefCell<Vec<Rc<Connection>>>,
    closing: Cell<bool>,
    left: WaitList,
}

impl Branch {
    pub(crate) fn new(reactor: &Reactor) -> Rc<Branch> {
        Rc::new(Branch {
            reactor: reactor.clone(),
            namespaces: RefCell::default(),
            connections: RefCell::default(),
            closing: Cell::new(false),
            left: WaitList::default(),
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

    pub(crate) fn add(&self, namespace: Rc<Namespace>) {
        let before = self.namespaces.borrow_mut().insert(namespace.id, namespace.clone());
        assert!(before.is_none(), "a number is given once");
        self.announce(&namespace);
    }

    /// Takes a namespace out; returns when nothing is done on it any more.
    pub(crate) async fn remove(&self, id: u32) {
        let Some(namespace) = self.namespaces.borrow_mut().remove(&id) else { return };
        self.announce(&namespace);
        namespace.rest().await;
    }

    /// Its volume may have grown.
    pub(crate) async fn look(&self, id: u32) {
        let Some(namespace) = self.namespaces.borrow().get(&id).cloned() else { return };
        namespace.disk.volume().look().await;
        self.announce(&namespace);
    }

    pub(crate) fn set_atomic_bytes(&self, id: u32, bytes: u32) {
        let Some(namespace) = self.namespaces.borrow().get(&id).cloned() else { return };
        if namespace.set_atomic_bytes(bytes) {
            self.announce(&namespace);
        }
    }

    /// Lets other reactors know what was done here.
    pub(crate) fn publish(&self) {
        for namespace in self.namespaces.borrow().values() {
            namespace.counters();
        }
    }

    /// Tells hosts that a namespace came, went or has changed.
    fn announce(&self, namespace: &Namespace) {
        for connection in self.connections.borrow().iter() {
            connection.namespace_changed(namespace);
        }
    }

    /// False: it takes no more.
    pub(crate) fn join(&self, connection: Rc<Connection>) -> bool {
        let takes = !self.closing.get();
        if takes {
            self.connections.borrow_mut().push(connection);
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
        Some(PartStatus {
            connections: u16::try_from(connections).unwrap_or(u16::MAX),
            counters: namespace.disk.counters(),
            traffic: namespace.disk.traffic(),
            trouble: namespace.disk.trouble(),
        })
    }

    /// Takes no more connections and cuts those that are there; returns when nothing is under way
    /// on any.
    pub(crate) async fn close(&self) {
        self.closing.set(true);
        self.connections.borrow().iter().for_each(|its| its.cut());
        self.left.until(&self.reactor, || self.connections.borrow().is_empty()).await;
    }
}
