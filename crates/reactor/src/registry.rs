//! Things that live on a reactor, named so that other threads can speak of them.
//!
//! A [`Key`] may travel; what it names never leaves its reactor.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;

/// Names a `T` on the reactor that issued the key.
pub struct Key<T> {
    id: u64,
    of: PhantomData<fn() -> T>,
}

impl<T> Clone for Key<T> {
    fn clone(&self) -> Key<T> {
        *self
    }
}

impl<T> Copy for Key<T> {}

impl<T> PartialEq for Key<T> {
    fn eq(&self, other: &Key<T>) -> bool {
        self.id == other.id
    }
}

impl<T> Eq for Key<T> {}

impl<T> std::fmt::Debug for Key<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({})", self.id)
    }
}

#[derive(Default)]
pub(crate) struct Registry {
    next_id: Cell<u64>,
    things: RefCell<BTreeMap<u64, Rc<dyn Any>>>,
}

impl Registry {
    pub(crate) fn publish<T: 'static>(&self, thing: Rc<T>) -> Key<T> {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.things.borrow_mut().insert(id, thing);
        Key { id, of: PhantomData }
    }

    pub(crate) fn get<T: 'static>(&self, key: Key<T>) -> Option<Rc<T>> {
        self.things.borrow().get(&key.id)?.clone().downcast().ok()
    }

    pub(crate) fn withdraw<T: 'static>(&self, key: Key<T>) -> Option<Rc<T>> {
        let thing = self.things.borrow_mut().remove(&key.id)?;
        thing.downcast().ok()
    }
}
