//! Goal: a call from one reactor to another is answered, whether they sleep or look for work, and
//! memory that was lent stays the caller's to keep until the last view of it is gone over there.
//! Method: two reactors, on two CPUs where there are two; an answer that leaves a view behind.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::call::{CALLS_MAX, Caller, calls};
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;

/// Longer than anything here takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// A view that is to outlive its call.
const KEEP: u64 = u64::MAX;

fn cores(poll_window: Duration) -> [Core; 2] {
    let cpus = std::thread::available_parallelism().unwrap().get();
    [0, 1].map(|index| Core::start(index % cpus, poll_window).unwrap())
}

fn on<T: Send + 'static, F: Future<Output = T> + 'static>(
    core: &Core,
    make: impl FnOnce(Reactor) -> F + Send + 'static,
) -> mpsc::Receiver<T> {
    core.sender().ask(make).unwrap()
}

fn wait<T>(answer: &mpsc::Receiver<T>) -> T {
    answer.recv_timeout(PATIENCE).expect("the reactor answers")
}

/// Fills the memory with the number that is asked for, and answers with the number after.
type Kept = Rc<RefCell<Vec<Buffers>>>;

fn connect(from: &Core, to: &Core) -> (Key, mpsc::Sender<()>) {
    let (caller, callee) = calls::<u64, u64>().unwrap();
    let (release, released) = mpsc::channel::<()>();
    wait(&on(to, move |reactor| async move {
        let kept = Kept::default();
        let its = kept.clone();
        let (sleeper, waker) = (reactor.clone(), reactor.clone());
        callee.serve(&reactor, async move |number: u64, memory: Buffers| {
            if number == KEEP {
                its.borrow_mut().push(memory);
                return 0;
            }
            // Some answers overtake others.
            if number.is_multiple_of(7) {
                sleeper.sleep(Duration::from_micros(50)).await;
            }
            let byte = u8::try_from(number % 256).unwrap();
            memory.copy_from_slice(&vec![byte; memory.len()]);
            number + 1
        });
        reactor.spawn(async move {
            while released.try_recv().is_err() {
                waker.sleep(Duration::from_millis(1)).await;
            }
            kept.borrow_mut().clear();
        });
    }));
    let key = wait(&on(from, move |reactor| async move {
        let caller = caller.open(&reactor);
        reactor.publish(caller)
    }));
    (key, release)
}

type Key = ashlar_reactor::registry::Key<Caller<u64, u64>>;

async fn ask(reactor: &Reactor, caller: &Caller<u64, u64>, number: u64) {
    let memory = reactor.buffer(512 * (1 + number as usize % 4));
    assert_eq!(caller.call(number, memory.clone().into()).await, number + 1);
    assert!(memory.bytes().iter().all(|byte| u64::from(*byte) == number % 256));
}

#[test]
fn calls_are_answered_whether_reactors_sleep_or_look() {
    for window in [Duration::ZERO, Duration::from_micros(50), Duration::from_millis(20)] {
        let [from, to] = cores(window);
        let (key, _release) = connect(&from, &to);
        wait(&on(&from, move |reactor| async move {
            let caller = reactor.get(key).unwrap();
            for number in 0..200 {
                ask(&reactor, &caller, number).await;
            }
            // More at a time than there is room for, in turns with none.
            for round in 0..3 {
                let all = (0..2 * CALLS_MAX as u64).map(|i| ask(&reactor, &caller, round * 31 + i));
                join_all(all).await;
                reactor.sleep(Duration::from_millis(2)).await;
            }
            assert_eq!(caller.call(5, Buffers::default()).await, 6);
            caller.close().await;
        }));
    }
}

#[test]
fn memory_stays_until_the_last_view_of_it_is_gone() {
    let [from, to] = cores(Duration::from_micros(50));
    let (key, release) = connect(&from, &to);
    let (place, closed) = wait(&on(&from, move |reactor| async move {
        let caller = reactor.get(key).unwrap();
        let memory = reactor.buffer(4096);
        let place = memory.as_ptr().addr();
        assert_eq!(caller.call(KEEP, memory.into()).await, 0);
        // Answered, and not given back: nobody else gets it.
        for number in 0..1000 {
            let other = reactor.buffer(4096);
            assert_ne!(other.as_ptr().addr(), place);
            ask(&reactor, &caller, number).await;
        }
        let (ended, closed) = mpsc::channel();
        let its = caller.clone();
        reactor.spawn(async move {
            its.close().await;
            ended.send(()).unwrap();
        });
        reactor.sleep(Duration::from_millis(20)).await;
        (place, closed)
    }));
    assert!(closed.try_recv().is_err(), "closed while memory of it is still used");
    release.send(()).unwrap();
    wait(&closed);
    wait(&on(&from, move |reactor| async move {
        let all: Vec<_> = (0..256).map(|_| reactor.buffer(4096)).collect();
        assert!(all.iter().any(|buffer| buffer.as_ptr().addr() == place), "it never came back");
    }));
}

#[test]
fn who_stops_to_wait_harms_nobody() {
    let [from, to] = cores(Duration::from_micros(50));
    let (key, _release) = connect(&from, &to);
    wait(&on(&from, move |reactor| async move {
        let caller = reactor.get(key).unwrap();
        for number in 0..3000 {
            let given_up = Cell::new(false);
            let memory = reactor.buffer(4096);
            let mut call = Box::pin(caller.call(number * 7, memory.into()));
            std::future::poll_fn(|context| {
                given_up.set(call.as_mut().poll(context).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
            assert!(given_up.get());
            drop(call);
            ask(&reactor, &caller, number).await;
        }
        caller.close().await;
    }));
}
