//! Messages from other threads to a reactor: closures that run on it.
//!
//! For the control plane, never per I/O. An eventfd wakes a sleeping reactor.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::mpsc;

use crate::executor::Reactor;
use crate::op::Op;

type Letter = Box<dyn FnOnce(&Reactor) + Send>;

/// The sending end; give a clone to every thread that must reach the reactor.
#[derive(Clone)]
pub struct Sender {
    letters: mpsc::Sender<Letter>,
    bell: std::sync::Arc<File>,
}

/// The reactor was stopped.
#[derive(Debug, thiserror::Error)]
#[error("the reactor has stopped")]
pub struct Stopped;

impl Sender {
    /// Runs `letter` on the reactor, soon. Letters of one sender run in order.
    pub fn send(&self, letter: impl FnOnce(&Reactor) + Send + 'static) -> Result<(), Stopped> {
        self.letters.send(Box::new(letter)).map_err(|_| Stopped)?;
        (&*self.bell).write_all(&1u64.to_ne_bytes()).map_err(|_| Stopped)
    }

    /// Starts something on the reactor; its answer can be waited for.
    pub fn ask<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        job: impl FnOnce(Reactor) -> F + Send + 'static,
    ) -> Result<mpsc::Receiver<T>, Stopped> {
        let (reply, answer) = mpsc::channel();
        self.send(move |reactor| {
            let future = job(reactor.clone());
            reactor.spawn(async move {
                // Nobody listens only if whoever asked has given up.
                let _ = reply.send(future.await);
            });
        })?;
        Ok(answer)
    }
}

/// The receiving end, to be moved to the reactor's thread.
pub struct Receiver {
    letters: mpsc::Receiver<Letter>,
    bell: File,
}

/// A file that one thread makes readable and another one waits for.
pub(crate) fn eventfd() -> std::io::Result<File> {
    // SAFETY: plain system call without pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: `fd` is a new descriptor that nothing else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A mailbox: many senders, one reactor.
pub fn mailbox() -> std::io::Result<(Sender, Receiver)> {
    let bell = eventfd()?;
    let (sender, receiver) = mpsc::channel();
    let ours = bell.try_clone()?;
    let sender = Sender { letters: sender, bell: std::sync::Arc::new(bell) };
    Ok((sender, Receiver { letters: receiver, bell: ours }))
}

impl Receiver {
    /// Runs letters until the reactor stops. Spawn this as a task.
    pub async fn serve(self, reactor: Reactor) {
        loop {
            while let Ok(letter) = self.letters.try_recv() {
                letter(&reactor);
            }
            // A poll that fails is repeated; the bell's count tells whether it rang.
            let _ = reactor.submit(Op::readable(self.bell.as_raw_fd())).await;
            let mut count = [0; 8];
            let _ = (&self.bell).read(&mut count);
        }
    }
}
