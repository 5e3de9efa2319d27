//! How other threads speak with a device: a letter to its reactor, and the wait for the reply.

use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;

use crate::vhost::device::Device;

/// A reply that takes longer may never come: the reactor was stopped, or a drive hangs.
const REPLY_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
#[error("the reactor has stopped, or does not answer")]
pub(crate) struct Gone;

/// A line to one device. Not to be used on the reactor's own thread: it would wait for itself.
#[derive(Clone)]
pub(crate) struct Line {
    core: Sender,
    device: Key<Device>,
}

impl Line {
    pub(crate) fn new(core: Sender, device: Key<Device>) -> Line {
        Line { core, device }
    }

    /// Runs `question` on the reactor.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Device) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let key = self.device;
        let answer = ask(&self.core, move |reactor, reply: mpsc::Sender<T>| {
            if let Some(device) = reactor.get(key) {
                let _ = reply.send(question(&device));
            }
        });
        answer.ok_or(Gone)
    }

    /// Runs `question` on the reactor and waits until its future has ended.
    pub(crate) fn ask_and_wait<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl FnOnce(Rc<Device>) -> F + Send + 'static,
    ) -> Result<T, Gone> {
        self.ask_and_wait_while(question, || false)
    }

    /// The same, but does not give up while `patient` holds.
    pub(crate) fn ask_and_wait_while<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl FnOnce(Rc<Device>) -> F + Send + 'static,
        patient: impl Fn() -> bool,
    ) -> Result<T, Gone> {
        let key = self.device;
        let letter = move |reactor: &Reactor, reply: mpsc::Sender<T>| {
            if let Some(device) = reactor.get(key) {
                let future = question(device);
                reactor.spawn(async move {
                    let _ = reply.send(future.await);
                });
            }
        };
        ask_while(&self.core, letter, patient).ok_or(Gone)
    }

    /// Takes the device off its reactor.
    pub(crate) fn withdraw(&self) {
        let key = self.device;
        let _ = self.core.send(move |reactor| {
            reactor.withdraw(key);
        });
    }
}

/// The lines to all devices of one export. The first is that of the reactor which has the volume;
/// ring after ring goes to the next one.
#[derive(Clone)]
pub(crate) struct Lines(Vec<Line>);

impl Lines {
    pub(crate) fn new(lines: Vec<Line>) -> Lines {
        assert!(!lines.is_empty(), "an export is served somewhere");
        Lines(lines)
    }

    pub(crate) fn first(&self) -> &Line {
        &self.0[0]
    }

    pub(crate) fn all(&self) -> &[Line] {
        &self.0
    }

    /// To the device that has this ring.
    pub(crate) fn of_ring(&self, ring: usize) -> &Line {
        &self.0[ring % self.0.len()]
    }

    /// Runs `question` on each reactor, one after the other.
    pub(crate) fn ask_all<T: Send + 'static>(
        &self,
        question: impl Fn(&Device) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, Gone> {
        self.0.iter().map(|line| line.ask(question.clone())).collect()
    }
}

/// Sends a letter that gets the means to reply, and waits. `None` if no reply will come.
pub(crate) fn ask<T: Send + 'static>(
    core: &Sender,
    letter: impl FnOnce(&Reactor, mpsc::Sender<T>) + Send + 'static,
) -> Option<T> {
    ask_while(core, letter, || false)
}

fn ask_while<T: Send + 'static>(
    core: &Sender,
    letter: impl FnOnce(&Reactor, mpsc::Sender<T>) + Send + 'static,
    patient: impl Fn() -> bool,
) -> Option<T> {
    let (reply, answer) = mpsc::channel();
    core.send(move |reactor| letter(reactor, reply)).ok()?;
    loop {
        match answer.recv_timeout(REPLY_WITHIN) {
            Ok(answer) => return Some(answer),
            Err(mpsc::RecvTimeoutError::Timeout) if patient() => {}
            Err(mpsc::RecvTimeoutError::Timeout | mpsc::RecvTimeoutError::Disconnected) => {
                return None;
            }
        }
    }
}
