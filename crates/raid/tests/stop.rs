//! Goal: an array comes to its end also when writes wait for room in its journal.
//! Method: more writes than fit, all at once, and then `stop`. Each is acknowledged or refused.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_raid::error::ArrayError;

use crate::pair::{Pair, run};

const WRITERS: u64 = 96;
const LEN: usize = 100 << 10;

#[test]
fn while_the_journal_is_full() {
    run(|reactor| async move {
        let pair = Pair::new(&reactor, Level::Raid6, 4, 512).await;
        let (written, refused) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for writer in 0..WRITERS {
            let (array, reactor) = (pair.array.clone(), reactor.clone());
            let (written, refused) = (written.clone(), refused.clone());
            reactor.clone().spawn(async move {
                let bytes = reactor.buffer(LEN);
                bytes.fill_zero();
                loop {
                    match array.write((writer * 128) << 10, bytes.clone().into()).await {
                        Ok(()) => written.set(written.get() + 1),
                        Err(ArrayError::Stopped) => break refused.set(refused.get() + 1),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        while written.get() == 0 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        let journal = pair.array.status().journal;
        assert!(u64::try_from(LEN).unwrap() * WRITERS > journal.bytes, "{journal:?}");
        pair.array.stop().await.unwrap();
        reactor.sleep(Duration::from_millis(1)).await;
        assert_eq!(refused.get(), WRITERS, "each hears of it");
        assert_eq!(pair.array.status().journal.used_bytes, 0);
    });
}
