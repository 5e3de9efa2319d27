//! How other threads speak with what an export has on a reactor (a device of vhost, …): a letter to
//! the reactor, and the wait for the reply.

use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;

use crate::export::ExportError;

/// A reply that takes longer may never come: the reactor was stopped, or a drive hangs.
const REPLY_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
#[error("the reactor has stopped, or does not answer")]
pub(crate) struct Gone;

/// A line to one of them. Not to be used on the reactor's own thread: it would wait for itself.
pub(crate) struct Line<T> {
    core: Sender,
    end: Key<T>,
}

impl<T> Clone for Line<T> {
    fn clone(&self) -> Line<T> {
        Line { core: self.core.clone(), end: self.end }
    }
}

impl<D: 'static> Line<D> {
    /// To what `make` makes on the reactor. `None`: it made nothing, or the reactor has stopped.
    pub(crate) fn open(
        core: Sender,
        make: impl FnOnce(&Reactor) -> Option<Rc<D>> + Send + 'static,
    ) -> Option<Line<D>> {
        let end = ask(&core, move |reactor, reply: mpsc::Sender<Key<D>>| {
            if let Some(end) = make(reactor) {
                let _ = reply.send(reactor.publish(end));
            }
        });
        Some(Line { core, end: end? })
    }

    /// Runs `question` on the reactor.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&D) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        Patience::begin().wait(self.post(question), || false)
    }

    /// Runs `question` on the reactor and waits until its future has ended.
    pub(crate) fn ask_and_wait<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl FnOnce(Rc<D>) -> F + Send + 'static,
    ) -> Result<T, Gone> {
        Patience::begin().wait(self.post_future(question), || false)
    }

    fn post<T: Send + 'static>(
        &self,
        question: impl FnOnce(&D) -> T + Send + 'static,
    ) -> Awaited<T> {
        let key = self.end;
        Awaited::post(&self.core, move |reactor, reply| {
            if let Some(end) = reactor.get(key) {
                let _ = reply.send(question(&end));
            }
        })
    }

    fn post_future<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl FnOnce(Rc<D>) -> F + Send + 'static,
    ) -> Awaited<T> {
        let key = self.end;
        Awaited::post(&self.core, move |reactor, reply| {
            if let Some(end) = reactor.get(key) {
                let future = question(end);
                reactor.spawn(async move {
                    let _ = reply.send(future.await);
                });
            }
        })
    }

    /// Takes the other end off its reactor.
    pub(crate) fn withdraw(&self) {
        let key = self.end;
        let _ = self.core.send(move |reactor| {
            reactor.withdraw(key);
        });
    }
}

/// The lines to all parts of one export. The first is that of the reactor which has the volume.
pub(crate) struct Lines<T>(Vec<Line<T>>);

impl<T> Clone for Lines<T> {
    fn clone(&self) -> Lines<T> {
        Lines(self.0.clone())
    }
}

impl<D: 'static> Lines<D> {
    /// Of an export that nobody serves.
    pub(crate) fn none() -> Lines<D> {
        Lines(Vec::new())
    }

    /// Of all parts, at least one, or of none.
    pub(crate) fn open(
        each: impl Iterator<Item = Option<Line<D>>>,
    ) -> Result<Lines<D>, ExportError> {
        let mut lines = Lines(Vec::new());
        for line in each {
            let Some(line) = line else {
                lines.withdraw();
                return Err(ExportError::NoVolume);
            };
            lines.0.push(line);
        }
        assert!(!lines.0.is_empty(), "an export is served somewhere");
        Ok(lines)
    }

    /// See [`Line::withdraw`].
    pub(crate) fn withdraw(&self) {
        self.0.iter().for_each(Line::withdraw);
    }

    pub(crate) fn first(&self) -> &Line<D> {
        &self.0[0]
    }

    pub(crate) fn all(&self) -> &[Line<D>] {
        &self.0
    }

    /// To the part that has this ring: ring after ring goes to the next one.
    pub(crate) fn of_ring(&self, ring: usize) -> &Line<D> {
        &self.0[ring % self.0.len()]
    }

    /// Runs `question` on each reactor. All are asked before the first reply is waited for, and all
    /// have the same time to reply; an error if any does not.
    pub(crate) fn ask_all<T: Send + 'static>(
        &self,
        question: impl Fn(&D) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, Gone> {
        let awaited = self.0.iter().map(|line| line.post(question.clone())).collect();
        wait_for_all(awaited, || false)
    }

    /// The same, and waits until their futures have ended.
    pub(crate) fn ask_all_and_wait<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl Fn(Rc<D>) -> F + Clone + Send + 'static,
    ) -> Result<Vec<T>, Gone> {
        self.ask_all_and_wait_while(question, || false)
    }

    /// The same, but does not give up while `patient` holds.
    pub(crate) fn ask_all_and_wait_while<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        question: impl Fn(Rc<D>) -> F + Clone + Send + 'static,
        patient: impl Fn() -> bool,
    ) -> Result<Vec<T>, Gone> {
        let awaited = self.0.iter().map(|line| line.post_future(question.clone())).collect();
        wait_for_all(awaited, patient)
    }
}

/// Sends a letter that gets the means to reply, and waits. `None` if no reply will come.
pub(crate) fn ask<T: Send + 'static>(
    core: &Sender,
    letter: impl FnOnce(&Reactor, mpsc::Sender<T>) + Send + 'static,
) -> Option<T> {
    Patience::begin().wait(Awaited::post(core, letter), || false).ok()
}

/// A reply that is under way.
struct Awaited<T>(mpsc::Receiver<T>);

impl<T: Send + 'static> Awaited<T> {
    /// To a reactor that has stopped, the letter is lost, and so is the means to reply.
    fn post(
        core: &Sender,
        letter: impl FnOnce(&Reactor, mpsc::Sender<T>) + Send + 'static,
    ) -> Awaited<T> {
        let (reply, answer) = mpsc::channel();
        let _ = core.send(move |reactor| letter(reactor, reply));
        Awaited(answer)
    }
}

/// How long replies are waited for, be it one or many.
struct Patience {
    until: Instant,
}

impl Patience {
    fn begin() -> Patience {
        Patience { until: now() + REPLY_WITHIN }
    }

    /// Begins again as often as it runs out while `patient` holds.
    fn wait<T>(&mut self, awaited: Awaited<T>, patient: impl Fn() -> bool) -> Result<T, Gone> {
        loop {
            match awaited.0.recv_timeout(self.until.saturating_duration_since(now())) {
                Ok(answer) => return Ok(answer),
                Err(mpsc::RecvTimeoutError::Timeout) if patient() => *self = Patience::begin(),
                Err(mpsc::RecvTimeoutError::Timeout | mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Gone);
                }
            }
        }
    }
}

/// Waits for each, also after one that does not come; then the first error, if there is one.
fn wait_for_all<T>(awaited: Vec<Awaited<T>>, patient: impl Fn() -> bool) -> Result<Vec<T>, Gone> {
    let mut patience = Patience::begin();
    let replies = awaited.into_iter().map(|its| patience.wait(its, &patient));
    replies.collect::<Vec<_>>().into_iter().collect()
}

#[expect(clippy::disallowed_methods, reason = "whoever asks is not a reactor's thread")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
