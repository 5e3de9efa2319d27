//! An export as it lives on one reactor: the connections that were assigned to it.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::socket::Socket;
use ashlar_reactor::wait_list::WaitList;

use crate::disk::{Disk, Trouble};
use crate::export::PartStatus;
use crate::nbd::connection::Connection;

/// Most connections of an export on one reactor, which bounds what they hold (64 MiB each, see
/// `lane`), and those of them that have not agreed on anything yet: where there is no room, the
/// oldest of the latter makes some.
const CONNECTIONS_MAX: usize = 24;
const HAGGLING_MAX: usize = 16;

pub(super) struct Post {
    disk: Rc<Disk>,
    connections: RefCell<Vec<Rc<Connection>>>,
    closing: Cell<bool>,
    ended: WaitList,
}

impl Post {
    pub(super) fn new(disk: Disk) -> Rc<Post> {
        Rc::new(Post {
            disk: Rc::new(disk),
            connections: RefCell::default(),
            closing: Cell::new(false),
            ended: WaitList::default(),
        })
    }

    fn reactor(&self) -> &Reactor {
        self.disk.reactor()
    }

    /// Connections that are there, whatever they do.
    pub(super) fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Serves a client from now on.
    pub(super) fn welcome(self: &Rc<Self>, stream: OwnedFd) {
        if self.closing.get() {
            return;
        }
        if !self.make_room() {
            return;
        }
        let socket = match Socket::new(self.reactor(), stream) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(export = self.disk.name(), %error, "a client is not served");
                return;
            }
        };
        let connection = Connection::new(&self.disk, socket);
        self.connections.borrow_mut().push(connection.clone());
        let post = self.clone();
        self.reactor().spawn(async move {
            connection.clone().live().await;
            let mut connections = post.connections.borrow_mut();
            connections.retain(|its| !Rc::ptr_eq(its, &connection));
            drop(connections);
            post.ended.wake_all(post.reactor());
        });
    }

    /// Who says nothing keeps nobody out who does. False: all are being served.
    fn make_room(&self) -> bool {
        let connections = self.connections.borrow();
        let mut haggling = connections.iter().filter(|its| !its.is_serving());
        // In the order in which they came.
        let (oldest, others) = (haggling.next(), haggling.count());
        let is_full = connections.len() >= CONNECTIONS_MAX;
        if !is_full && others + 1 < HAGGLING_MAX {
            return true;
        }
        if let Some(oldest) = oldest {
            oldest.leave();
            return true;
        }
        let text = format!("a client was turned away: {CONNECTIONS_MAX} connections are there");
        tracing::warn!(export = self.disk.name(), "{text}");
        self.disk.note(Trouble::Initiator(text));
        false
    }

    /// The volume may have grown.
    pub(super) async fn look(&self) {
        self.disk.volume().look().await;
    }

    pub(super) fn status(&self) -> PartStatus {
        let connections = self.connections.borrow();
        let serving = connections.iter().filter(|connection| connection.is_serving()).count();
        PartStatus::of(&self.disk, serving > 0, serving)
    }

    /// Lets all clients go, and waits until they have gone.
    pub(super) async fn close(&self) {
        self.closing.set(true);
        self.disk.throttle().hurry();
        self.connections.borrow().iter().for_each(|connection| connection.leave());
        self.ended.until(self.reactor(), || self.connections.borrow().is_empty()).await;
    }
}
