//! Goal: an array is never written to by two hosts, and a host that is gone keeps nobody waiting
//! for long.
//! Method: two hosts with drives of their own on the same simulated storage, in virtual time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::lease::Lease;
use ashlar_format::record::{self, SEQUENCE_MAX};
use ashlar_format::units::{Area, MemberIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::label;
use ashlar_raid::lease::{self, BEAT_PERIOD, Host, WATCH_BEATS};
use ashlar_raid::member::Member;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::prng::Prng;
use ashlar_sim::world::SharedWorld;
use zerocopy::IntoBytes;

use crate::storage::{open, spec};

mod storage;

const MEMBERS: u32 = 3;
const DRIVE_BYTES: u64 = 12 << 20;
const WATCH: Duration = Duration::from_secs(BEAT_PERIOD.as_secs() * WATCH_BEATS as u64);
const LEASE_BYTES: usize = Lease::BYTES as usize;
const A_MOMENT: Duration = Duration::from_secs(2);
/// Where leases are on a member.
const LEASES: std::ops::Range<u64> = 704 << 10..712 << 10;

fn alpha() -> Host {
    Host::new([1; 16], "alpha")
}

fn beta() -> Host {
    Host::new([2; 16], "beta")
}

/// Storage that several hosts reach.
fn storage(seed: u64, latency_ns_max: u64) -> SharedWorld {
    storage::storage(seed, MEMBERS, DRIVE_BYTES, latency_ns_max)
}

/// Runs until the test ends; then whoever has not stopped dies.
fn life<F>(world: &SharedWorld, order: u64, test: impl FnOnce(Reactor) -> F)
where
    F: Future<Output = ()> + 'static,
{
    assert!(storage::life(world, order, None, test), "the test ends");
}

/// One host's view of the drives.
fn drives(reactor: &Reactor) -> Vec<Rc<Drive>> {
    (0..MEMBERS).map(|drive| open(reactor, drive, DRIVE_BYTES)).collect()
}

async fn create(reactor: &Reactor, host: Host) -> Rc<Array> {
    create_as(reactor, Level::Raid5, host).await
}

async fn create_as(reactor: &Reactor, level: Level, host: Host) -> Rc<Array> {
    let drives = drives(reactor).into_iter().zip(10..).map(|(drive, id)| ([id; 16], drive));
    Array::create(reactor, &spec(level, None, Some(host)), drives.collect()).await.unwrap()
}

async fn start(reactor: &Reactor, host: Host, force: bool) -> Result<Rc<Array>, AssembleError> {
    let options = AssembleOptions { force, host: Some(host), ..AssembleOptions::default() };
    Array::assemble(reactor, drives(reactor), options).await
}

async fn write(reactor: &Reactor, array: &Rc<Array>, value: u8) -> Result<(), ArrayError> {
    let buffer = reactor.buffer(4096);
    buffer.copy_from_slice(&[value; 4096]);
    array.write(0, buffer.into()).await
}

async fn read(reactor: &Reactor, array: &Rc<Array>) -> u8 {
    let buffer = reactor.buffer(4096);
    array.read(0, buffer.clone().into()).await.unwrap();
    buffer.bytes()[0]
}

fn in_use(by: &str) -> Option<AssembleError> {
    Some(AssembleError::InUse { host: format!("host {by}") })
}

#[test]
fn a_host_that_lives_keeps_its_array_and_one_that_stops_hands_it_over() {
    let world = storage(1, 1_000_000);
    life(&world, 1, |reactor| async move {
        let ours = create(&reactor, alpha()).await;
        for _ in 0..3 {
            let began = reactor.now();
            assert_eq!(start(&reactor, beta(), false).await.err(), in_use("alpha"));
            assert!(reactor.now().since(began) < 2 * BEAT_PERIOD);
            write(&reactor, &ours, 7).await.unwrap();
        }
        reactor.sleep(10 * BEAT_PERIOD).await;
        ours.stop().await.unwrap();
        let began = reactor.now();
        let theirs = start(&reactor, beta(), false).await.unwrap();
        assert!(reactor.now().since(began) < A_MOMENT);
        assert_eq!(read(&reactor, &theirs).await, 7);
        assert_eq!(start(&reactor, alpha(), false).await.err(), in_use("beta"));
        theirs.stop().await.unwrap();
    });
}

#[test]
fn a_host_that_died_is_waited_for_and_then_replaced() {
    let world = storage(2, 1_000_000);
    life(&world, 1, |reactor| async move {
        let array = create(&reactor, alpha()).await;
        write(&reactor, &array, 3).await.unwrap();
        array.flush().await.unwrap();
    });
    // It may start again at once.
    life(&world, 2, |reactor| async move {
        let began = reactor.now();
        start(&reactor, alpha(), false).await.unwrap();
        assert!(reactor.now().since(began) < A_MOMENT);
    });
    life(&world, 3, |reactor| async move {
        let began = reactor.now();
        let array = start(&reactor, beta(), false).await.unwrap();
        let waited = reactor.now().since(began);
        assert!((WATCH..WATCH + A_MOMENT).contains(&waited), "{waited:?}");
        assert_eq!(read(&reactor, &array).await, 3);
        assert_eq!(array.state(), ArrayState::Optimal);
        array.stop().await.unwrap();
    });
}

#[test]
fn a_host_that_lost_its_array_never_writes_again() {
    let world = storage(3, 1_000_000);
    let storage = world.clone();
    life(&world, 1, |reactor| async move {
        let ours = create(&reactor, alpha()).await;
        let (array, its) = (ours.clone(), reactor.clone());
        let ended = Rc::new(RefCell::new(None));
        let why = ended.clone();
        // It is in the middle of things.
        reactor.spawn(async move {
            while why.borrow().is_none() {
                *why.borrow_mut() = write(&its, &array, 1).await.err();
            }
        });
        let theirs = start(&reactor, beta(), true).await.unwrap();
        reactor.sleep(BEAT_PERIOD).await;
        assert_eq!(ours.status().lost_to.as_deref(), Some("host beta"));
        assert!(ended.borrow().is_some());
        assert_eq!(write(&reactor, &ours, 2).await, Err(ArrayError::Stopped));
        write(&reactor, &theirs, 3).await.unwrap();
        theirs.stop().await.unwrap();
        let all = || {
            let world = storage.borrow();
            let drives = world.drives.iter();
            drives.map(|drive| drive.peek(0, DRIVE_BYTES as usize)).collect::<Vec<_>>()
        };
        let before = all();
        // With or without an error: it has nothing to put to rest.
        let _ = ours.stop().await;
        reactor.sleep(WATCH).await;
        assert!(all() == before, "something was written");
        let again = start(&reactor, beta(), false).await.unwrap();
        assert_eq!(read(&reactor, &again).await, 3);
        again.stop().await.unwrap();
    });
}

/// This drive cannot read these slots of its leases any more, until they are written.
fn darken(world: &SharedWorld, drive: usize, slots: &[u64]) {
    for slot in slots {
        let first = (LEASES.start + slot * Lease::BYTES) / 512;
        world.borrow_mut().drives[drive].latent.extend(first..first + Lease::BYTES / 512);
    }
}

/// The array is told of in both slots of the member that is left.
async fn leave_one_member(reactor: &Reactor, storage: &SharedWorld, array: &Rc<Array>) {
    write(reactor, array, 1).await.unwrap();
    for index in [1, 2] {
        array.status().members[index].drive.clone().unwrap().pull();
        storage.borrow_mut().kill(index as u32);
    }
    write(reactor, array, 2).await.unwrap();
    reactor.sleep(2 * BEAT_PERIOD).await;
}

const DARK: [&[u64]; 3] = [&[0], &[1], &[0, 1]];

/// Whose the array is nobody can say then: who has it waits, and nobody else gets it.
#[test]
fn where_no_lease_can_be_read_nobody_goes_on() {
    for slots in DARK {
        let world = storage(13, 1_000_000);
        let storage = world.clone();
        life(&world, 1, |reactor| async move {
            let ours = create_as(&reactor, Level::Raid1, alpha()).await;
            leave_one_member(&reactor, &storage, &ours).await;
            darken(&storage, 0, slots);
            let leases = || storage.borrow().drives[0].peek(LEASES.start, 2 * LEASE_BYTES);
            reactor.sleep(WATCH).await;
            let (before, done) = (leases(), Rc::new(RefCell::new(false)));
            let (array, its, notes) = (ours.clone(), reactor.clone(), done.clone());
            reactor.spawn(async move {
                write(&its, &array, 3).await.unwrap();
                *notes.borrow_mut() = true;
            });
            let theirs = start(&reactor, beta(), false).await;
            assert_eq!(theirs.err(), Some(AssembleError::LeaseUnreadable));
            assert!(leases() == before && !*done.borrow());
            // It was a bad cable.
            storage.borrow_mut().drives[0].latent.clear();
            reactor.sleep(3 * BEAT_PERIOD).await;
            assert!(*done.borrow());
            assert_eq!(start(&reactor, beta(), false).await.err(), in_use("alpha"));
            ours.stop().await.unwrap();
        });
    }
}

/// What it is worth then, an operator can say.
#[test]
fn an_array_of_which_no_lease_can_be_read_can_be_stopped_and_started_by_force() {
    for slots in DARK {
        let world = storage(17, 1_000_000);
        for order in 0..8 {
            life(&world, order, |reactor| async move {
                match order {
                    0 => drop(create_as(&reactor, Level::Raid1, alpha()).await),
                    _ => drop(start(&reactor, alpha(), false).await.unwrap()),
                }
            });
        }
        let storage = world.clone();
        life(&world, 9, |reactor| async move {
            let ours = start(&reactor, alpha(), false).await.unwrap();
            leave_one_member(&reactor, &storage, &ours).await;
            let epoch = ours.status().epoch;
            darken(&storage, 0, slots);
            reactor.sleep(WATCH).await;
            let began = reactor.now();
            let _ = ours.stop().await;
            assert!(reactor.now().since(began) < 4 * WATCH);
            let refused = start(&reactor, beta(), false).await.err();
            assert_eq!(refused, Some(AssembleError::LeaseUnreadable));
            let theirs = start(&reactor, beta(), true).await.unwrap();
            // An owner that stalled would take its array back from a smaller one.
            assert!(theirs.status().epoch > epoch);
            assert!(storage.borrow().drives[0].latent.is_empty());
            write(&reactor, &theirs, 4).await.unwrap();
            reactor.sleep(2 * WATCH).await;
            assert_eq!(start(&reactor, alpha(), false).await.err(), in_use("beta"));
            theirs.stop().await.unwrap();
            let ours = start(&reactor, alpha(), false).await.unwrap();
            assert_eq!(read(&reactor, &ours).await, 4);
            ours.stop().await.unwrap();
        });
    }
}

/// One host reaches two members, of which one is slow; another has got the array meanwhile on the
/// one that it reaches. What that shows of it counts, though it proves nothing.
#[test]
fn a_lease_that_is_seen_counts_though_another_may_hide_beside_it() {
    let mut met = 0;
    for seed in 0..200 {
        let world = storage(seed, 100_000);
        let (storage, mut prng) = (world.clone(), Prng::from_seed(seed));
        {
            let traits = &mut world.borrow_mut().drives[0].traits;
            (traits.latency_ns_min, traits.latency_ns_max) = (100_000_000, 100_100_000);
        }
        let late = Duration::from_nanos(99_500_000 + prng.below(800_000));
        let got = Rc::new(RefCell::new(Vec::new()));
        let notes = got.clone();
        life(&world, seed, |reactor| async move {
            let (its, disks) = (reactor.clone(), storage);
            reactor.spawn(async move {
                // The first claim stands in the other one.
                its.sleep(Duration::from_millis(700)).await;
                darken(&disks, 1, &[0]);
            });
            let come = async |host: Host, after: Duration, which: std::ops::Range<usize>| {
                reactor.sleep(after).await;
                let its = members(&reactor)[which].to_vec();
                let leases = lease::places(&its);
                lease::take(&reactor, [9; 16], &its, &leases, &host, None).await.is_ok()
            };
            let (one, other) = (come(alpha(), Duration::ZERO, 0..2), come(beta(), late, 1..2));
            *notes.borrow_mut() = join_all([one, other]).await;
        });
        let got = got.take();
        assert_ne!(got, [true, true], "seed {seed}");
        met += u32::from(got == [false, true]);
    }
    assert!(met > 10, "{met}");
}

/// Nothing can be written, for good: it cannot be put to rest, but it stops.
#[test]
fn an_array_whose_lease_cannot_be_written_stops_all_the_same() {
    let world = storage(14, 1_000_000);
    let storage = world.clone();
    life(&world, 1, |reactor| async move {
        let array = create(&reactor, alpha()).await;
        write(&reactor, &array, 1).await.unwrap();
        let all = Area { offset: 0, len: DRIVE_BYTES };
        storage.borrow_mut().drives.iter_mut().for_each(|drive| drive.full = Some(all));
        reactor.sleep(2 * WATCH).await;
        let began = reactor.now();
        assert!(array.stop().await.is_err());
        assert!(reactor.now().since(began) < 4 * WATCH);
    });
}

/// Now and then drives take long, from milliseconds to longer than a host waits for a rival.
async fn stumbling(reactor: Reactor, world: SharedWorld, mut prng: Prng) {
    for _ in 0..100 {
        let until = world.borrow().now_ns() + prng.below(300_000);
        let (which, factor) = (prng.below(1 << MEMBERS), [100, 4_000, 40_000][prng.index(3)]);
        for (index, drive) in world.borrow_mut().drives.iter_mut().enumerate() {
            if which >> index & 1 == 1 {
                (drive.slow_factor, drive.slow_until_ns) = (factor, until);
            }
        }
        reactor.sleep(Duration::from_nanos(prng.below(600_000))).await;
    }
}

#[test]
fn of_hosts_that_come_at_once_one_gets_the_array() {
    let (mut won, mut refused, mut later) = (0, 0, 0);
    for seed in 0..3000 {
        let mut prng = Prng::from_seed(seed);
        let world = storage(seed, 100_000);
        let storage = world.clone();
        let apart = Duration::from_nanos(prng.below(1_000_000));
        let taken = Rc::new(RefCell::new(Vec::new()));
        let times = taken.clone();
        life(&world, seed, |reactor| async move {
            reactor.spawn(stumbling(reactor.clone(), storage, prng));
            let come = async |host: Host, after: Duration| {
                reactor.sleep(after).await;
                let members = members(&reactor);
                let leases = lease::places(&members);
                match lease::take(&reactor, [9; 16], &members, &leases, &host, None).await {
                    Ok(claim) => times.borrow_mut().push((reactor.now(), claim)),
                    Err(AssembleError::InUse { .. }) => {}
                    Err(error) => panic!("seed {seed}: {error}"),
                }
            };
            join_all([come(alpha(), apart), come(beta(), Duration::ZERO)]).await;
        });
        match taken.borrow()[..] {
            [] => refused += 1,
            [_] => won += 1,
            [(_, first), (then, _)] => {
                // The first would have beaten, or have trusted its lease no longer.
                assert!(then >= first.until(), "seed {seed}: two hosts have the array");
                later += 1;
            }
            [..] => unreachable!(),
        }
    }
    assert!(won + refused > 20 && later > 1000, "{won} {refused} {later}");
}

fn members(reactor: &Reactor) -> Vec<Member> {
    let areas = label::plan(DRIVE_BYTES, 1).unwrap();
    let member = |(drive, id)| Member::new([id; 16], Some(drive), areas, MemberState::Trusted);
    drives(reactor).into_iter().zip(10..).map(member).collect()
}

#[test]
fn a_dead_member_costs_no_lease() {
    let world = storage(5, 1_000_000);
    let storage = world.clone();
    life(&world, 1, |reactor| async move {
        let ours = create(&reactor, alpha()).await;
        storage.borrow_mut().kill(1);
        for value in 0..5 {
            reactor.sleep(BEAT_PERIOD).await;
            write(&reactor, &ours, value).await.unwrap();
            assert_eq!(read(&reactor, &ours).await, value);
        }
        assert_eq!(start(&reactor, beta(), true).await.map(|_| ()), Ok(()));
    });
}

/// Members that were away for long go on above the one that was not, which another host still sees
/// when it is lost here.
#[test]
fn a_lease_goes_on_where_the_member_that_was_ahead_is_gone() {
    let world = storage(11, 1_000_000);
    life(&world, 1, |reactor| async move {
        let ours = create_as(&reactor, Level::Raid1, alpha()).await;
        let pull = |index: usize| ours.status().members[index].drive.clone().unwrap().pull();
        [1, 2].into_iter().for_each(pull);
        write(&reactor, &ours, 1).await.unwrap();
        reactor.sleep(20 * BEAT_PERIOD).await;
        for index in [1, 2] {
            let drive = drives(&reactor).swap_remove(index);
            let back = ours.return_member(MemberIndex::new(index), drive, [77; 16]).await;
            assert_eq!(back, Ok(()), "{index}");
        }
        reactor.sleep(100 * A_MOMENT).await;
        assert_eq!(ours.state(), ArrayState::Optimal);
        pull(0);
        write(&reactor, &ours, 2).await.unwrap();
        for value in 3..6 {
            assert_eq!(start(&reactor, beta(), false).await.err(), in_use("alpha"));
            write(&reactor, &ours, value).await.unwrap();
            assert_eq!(read(&reactor, &ours).await, value);
        }
        ours.stop().await.unwrap();
    });
}

/// Nothing could come after it, and its array could never be started again.
#[test]
fn a_lease_that_no_array_reaches_keeps_nobody_out() {
    let world = storage(12, 1_000_000);
    life(&world, 1, |reactor| async move {
        create(&reactor, alpha()).await.stop().await.unwrap();
        for (epoch, beat) in [(SEQUENCE_MAX, 1), (1, SEQUENCE_MAX)] {
            let mut forged = Lease::free([9; 16]);
            (forged.host, forged.epoch, forged.beat) = ([5; 16], epoch.into(), beat.into());
            record::seal(&mut forged, [10; 16], LEASES.start, beat);
            let buffer = reactor.buffer(forged.as_bytes().len());
            buffer.copy_from_slice(forged.as_bytes());
            drives(&reactor)[0].write(LEASES.start, buffer.into()).await.unwrap();
            let ours = start(&reactor, alpha(), false).await.unwrap();
            write(&reactor, &ours, 1).await.unwrap();
            reactor.sleep(2 * WATCH).await;
            assert_eq!(ours.status().lost_to, None);
            ours.stop().await.unwrap();
        }
    });
}

/// Drives that take so long that a beat takes longer than another host would have waited.
#[test]
fn requests_wait_while_nobody_knows_who_has_the_array() {
    let world = storage(6, 10_000);
    let storage = world.clone();
    life(&world, 1, |reactor| async move {
        let ours = create(&reactor, alpha()).await;
        write(&reactor, &ours, 1).await.unwrap();
        // Until it has cleaned up after itself.
        reactor.sleep(4 * BEAT_PERIOD).await;
        let until = storage.borrow().now_ns() + 20 * 1_000_000_000;
        for drive in &mut storage.borrow_mut().drives {
            // 10 µs become 9 s: not yet the silence that a drive fails by.
            (drive.slow_factor, drive.slow_until_ns) = (900_000, until);
        }
        reactor.sleep(Duration::from_secs(16)).await;
        let (array, its) = (ours.clone(), reactor.clone());
        reactor.spawn(async move { write(&its, &array, 2).await.unwrap() });
        reactor.sleep(Duration::from_secs(1)).await;
        for op in storage.borrow().in_flight(|_| true) {
            let offset = op.split(['(', ',']).nth(2).and_then(|text| text.trim().parse().ok());
            assert!(offset.is_some_and(|offset| LEASES.contains(&offset)), "{op}");
        }
        reactor.sleep(2 * WATCH).await;
        assert_eq!(read(&reactor, &ours).await, 2);
        ours.stop().await.unwrap();
    });
}

/// An array whose drives all went, and have been away for long; `in_write`: in the middle of one.
async fn all_away(reactor: &Reactor, in_write: bool) -> Rc<Array> {
    let array = create(reactor, alpha()).await;
    write(reactor, &array, 1).await.unwrap();
    array.flush().await.unwrap();
    let answer = Rc::new(RefCell::new(None));
    if in_write {
        let (its, hears, to) = (reactor.clone(), answer.clone(), array.clone());
        reactor.spawn(async move { *hears.borrow_mut() = Some(write(&its, &to, 2).await) });
    }
    // Less than anything takes that was begun.
    reactor.sleep(Duration::from_micros(5)).await;
    array.status().members.into_iter().for_each(|member| member.drive.unwrap().pull());
    reactor.sleep(4 * BEAT_PERIOD).await;
    assert_eq!(answer.take(), in_write.then_some(Err(ArrayError::Lost)));
    array
}

/// A batch that was under way when they went is void: they are told so before they are members.
#[test]
fn drives_that_were_all_away_for_long_are_taken_back() {
    let world = storage(8, 1_000_000);
    life(&world, 1, |reactor| async move {
        let array = all_away(&reactor, true).await;
        for (index, drive) in drives(&reactor).into_iter().enumerate() {
            let back = array.return_member(MemberIndex::new(index), drive, [77; 16]).await;
            assert_eq!(back, Ok(()), "{index}");
        }
        assert_eq!(array.state(), ArrayState::Optimal);
        assert_eq!(read(&reactor, &array).await, 1);
    });
    life(&world, 2, |reactor| async move {
        let array = start(&reactor, alpha(), false).await.unwrap();
        assert_eq!(read(&reactor, &array).await, 1);
        array.stop().await.unwrap();
    });
}

/// Its lease cannot be read, so nothing on it says whose the array is.
#[test]
fn a_drive_that_proves_nothing_keeps_no_other_from_coming_back() {
    for in_write in [false, true] {
        proves_nothing(in_write);
    }
}

fn proves_nothing(in_write: bool) {
    let world = storage(9, 1_000_000);
    let storage = world.clone();
    life(&world, 1, move |reactor| async move {
        let array = all_away(&reactor, in_write).await;
        let sectors = LEASES.start / 512..LEASES.end / 512;
        storage.borrow_mut().drives[0].latent.extend(sectors);
        let comes_back = async |index: usize| {
            let drive = drives(&reactor).swap_remove(index);
            array.return_member(MemberIndex::new(index), drive, [77; 16]).await
        };
        assert!(comes_back(0).await.is_err());
        for index in [1, 2, 0] {
            assert_eq!(comes_back(index).await, Ok(()), "{index}");
        }
        assert_eq!(array.state(), ArrayState::Optimal);
        assert_eq!(read(&reactor, &array).await, 1);
        array.stop().await.unwrap();
    });
}
