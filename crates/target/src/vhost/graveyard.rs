//! What takes longer to give back than a reactor may pause: to unmap gigabytes, or to unmap at all
//! while another thread changes what is mapped. Reactors send it to the socket's thread, which
//! holds the other end.

use std::ops::Deref;
use std::sync::mpsc;

/// Where it goes once nobody uses it any more.
pub(crate) type Graveyard = mpsc::Sender<Retired>;

/// To be dropped by who receives it.
pub(crate) type Retired = Box<dyn Send>;

/// Goes to the graveyard instead of being dropped.
pub(crate) struct Kept<T: Send + 'static> {
    /// Until this is dropped.
    its: Option<T>,
    graveyard: Graveyard,
}

impl<T: Send + 'static> Kept<T> {
    pub(crate) fn new(its: T, graveyard: &Graveyard) -> Kept<T> {
        Kept { its: Some(its), graveyard: graveyard.clone() }
    }
}

impl<T: Send + 'static> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.its.as_ref().expect("taken when this is dropped")
    }
}

impl<T: Send + 'static> Drop for Kept<T> {
    fn drop(&mut self) {
        if let Some(its) = self.its.take() {
            // If the socket's thread has ended, it comes back and is dropped here.
            let _ = self.graveyard.send(Box::new(its));
        }
    }
}
