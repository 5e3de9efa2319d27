//! Two reactors that send each other messages: a ring each way, and a bell for who sleeps.
//!
//! For requests, where a [mailbox](crate::mailbox) would be too slow: a message costs no system
//! call, and the link allocates nothing for it; a call that lends memory does, a loan and a region
//! for each piece, on the reactor that is asked. A reactor that is awake finds a message in its
//! next turn; one that has stopped to look is rung for, once for all messages of a turn of the
//! other.
//!
//! Invariant: an end that is armed (`poller.rs`) has said so before its last look, see `doze.rs`.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rtrb::{Consumer, Producer, RingBuffer};

use crate::doze::Doze;
use crate::executor::Reactor;
use crate::mailbox::eventfd;
use crate::op::Op;
use crate::poller::{Poller, PollerId};
use crate::wait_list::WaitList;

/// Wait before a bell that could not be waited for is tried again.
const LISTEN_AGAIN: Duration = Duration::from_millis(10);

/// Of one end, heard by its reactor.
struct Bell {
    file: File,
    doze: Doze,
}

impl Bell {
    fn new() -> std::io::Result<Arc<Bell>> {
        Ok(Arc::new(Bell { file: eventfd()?, doze: Doze::awake() }))
    }

    fn ring(&self) {
        // One that is full has rung already.
        let _ = (&self.file).write(&1u64.to_ne_bytes());
    }
}

/// One end, before it is opened on its reactor.
pub(crate) struct End<Out, In> {
    outbox: Producer<Out>,
    inbox: Consumer<In>,
    own: Arc<Bell>,
    other: Arc<Bell>,
}

/// The two ends of a link with room for so many messages on their way to the one and to the other.
pub(crate) fn link<A, B>(to_first: usize, to_second: usize) -> std::io::Result<Ends<A, B>> {
    let (a_out, a_in) = RingBuffer::new(to_second);
    let (b_out, b_in) = RingBuffer::new(to_first);
    let (a, b) = (Bell::new()?, Bell::new()?);
    let first = End { outbox: a_out, inbox: b_in, own: a.clone(), other: b.clone() };
    let second = End { outbox: b_out, inbox: a_in, own: b, other: a };
    Ok((first, second))
}

pub(crate) type Ends<A, B> = (End<A, B>, End<B, A>);

/// What an end hears.
pub(crate) enum News<In> {
    Message(In),
    /// The other end was closed: there will be no more.
    Closed,
}

/// One end, at work. It lives until it is closed.
pub(crate) struct Link<Out, In> {
    reactor: Reactor,
    /// `None`: closed.
    outbox: RefCell<Option<Producer<Out>>>,
    inbox: RefCell<Consumer<In>>,
    own: Arc<Bell>,
    other: Arc<Bell>,
    receive: Box<dyn Fn(News<In>)>,
    poller: Cell<Option<PollerId>>,
    armed: Cell<bool>,
    /// Something was sent since the last look at the other's bell.
    has_sent: Cell<bool>,
    /// That the other end was closed was told.
    is_over: Cell<bool>,
    listens: Cell<bool>,
    ended: WaitList,
}

impl<Out: 'static, In: 'static> End<Out, In> {
    /// `receive` is told of what comes while the reactor looks at its pollers: all it may do is to
    /// remember it, to wake tasks and to spawn them.
    pub(crate) fn open(
        self,
        reactor: &Reactor,
        receive: impl Fn(News<In>) + 'static,
    ) -> Rc<Link<Out, In>> {
        let End { outbox, inbox, own, other } = self;
        let link = Rc::new(Link {
            reactor: reactor.clone(),
            outbox: RefCell::new(Some(outbox)),
            inbox: RefCell::new(inbox),
            own,
            other,
            receive: Box::new(receive),
            poller: Cell::new(None),
            armed: Cell::new(false),
            has_sent: Cell::new(false),
            is_over: Cell::new(false),
            listens: Cell::new(true),
            ended: WaitList::default(),
        });
        reactor.spawn(link.clone().listen());
        link.poller.set(Some(reactor.add_poller(link.clone())));
        link
    }
}

impl<Out: 'static, In: 'static> Link<Out, In> {
    /// Panics where there is no room: who sends knows how much is under way.
    pub(crate) fn send(&self, message: Out) {
        let mut outbox = self.outbox.borrow_mut();
        let outbox = outbox.as_mut().expect("an end that was not closed");
        assert!(outbox.push(message).is_ok(), "more messages than the link has room for");
        self.has_sent.set(true);
        self.rouse();
    }

    /// Nothing is sent from here any more, and nothing heard. The other end is told.
    pub(crate) async fn close(&self) {
        drop(self.outbox.take());
        self.other.ring();
        self.own.ring();
        self.ended.until(&self.reactor, || !self.listens.get()).await;
        if let Some(poller) = self.poller.take() {
            self.reactor.remove_poller(poller);
        }
    }

    /// Messages may be there: it is looked for them again, if it was not.
    fn rouse(&self) {
        if self.armed.get()
            && let Some(poller) = self.poller.get()
        {
            self.reactor.rouse(poller);
        }
    }

    fn is_open(&self) -> bool {
        self.outbox.borrow().is_some()
    }

    /// Waits for the bell. It needs no answer while messages are looked for.
    async fn listen(self: Rc<Self>) {
        while self.is_open() {
            let wait = self.reactor.submit(Op::readable(self.own.file.as_raw_fd()));
            if wait.await.is_err() {
                self.reactor.sleep(LISTEN_AGAIN).await;
            }
            let mut count = [0; 8];
            let _ = (&self.own.file).read(&mut count);
            self.rouse();
        }
        self.listens.set(false);
        self.ended.wake_all(&self.reactor);
    }
}

impl<Out: 'static, In: 'static> Poller for Link<Out, In> {
    fn poll(&self) -> bool {
        let mut any = false;
        // Looked at first: what was sent before the end is there by then.
        let is_abandoned = self.inbox.borrow().is_abandoned();
        loop {
            let message = self.inbox.borrow_mut().pop();
            let Ok(message) = message else { break };
            (self.receive)(News::Message(message));
            any = true;
        }
        if is_abandoned && !self.is_over.replace(true) {
            (self.receive)(News::Closed);
            any = true;
        }
        if self.has_sent.take() {
            any = true;
            if self.other.doze.wants_waking() {
                self.other.ring();
            }
        }
        any
    }

    fn arm(&self) -> bool {
        self.armed.set(true);
        self.own.doze.begin();
        let inbox = self.inbox.borrow();
        let is_over = inbox.is_abandoned() && !self.is_over.get();
        self.has_sent.get() || is_over || !inbox.is_empty()
    }

    fn disarm(&self) {
        self.armed.set(false);
        self.own.doze.end();
    }
}
