//! Goal: rebuild and scrub move at the share that was set of what the drives can do; under load
//! they leave more to guests, but never stand still; and each stripe is read once.
//! Method: modelled drives under a clock that jumps. The formulas are of the geometry alone.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::status::{Progress, ScrubState};

use crate::modelled::{Asks, BYTES_PER_SECOND, Guests, LATENCY, full_array, rebuild, run};

fn share(percent: u8) -> SettingsChange {
    SettingsChange { rebuild_percent: Some(percent), ..SettingsChange::default() }
}

/// The new drive takes all that it can: its data at full speed, in milliseconds.
fn fill_ms(array: &Array) -> u64 {
    let layout = array.layout();
    layout.member_stripes() * u64::from(layout.chunk_bytes) * 1000 / BYTES_PER_SECOND
}

fn assert_about(what: &str, took: Duration, wanted_ms: u64) {
    let ms = took.as_millis() as u64;
    println!("{what}: {ms} ms, wanted {wanted_ms} ms");
    assert!(ms * 10 <= wanted_ms * 11 && ms * 10 >= wanted_ms * 9, "{what}: {ms}, {wanted_ms} ms");
}

#[test]
fn a_rebuild_has_its_share_of_idle_drives() {
    let kinds = [(Level::Raid5, 5, &[2][..]), (Level::Raid6, 6, &[0, 3]), (Level::Raid1, 2, &[1])];
    let shares = [100, 30, 10].map(|percent| (percent, kinds[0]));
    for (percent, (level, members, lost)) in
        shares.into_iter().chain([(30, kinds[1]), (30, kinds[2])])
    {
        run(|reactor| async move {
            let kind = (level, members);
            let array = full_array(&reactor, kind, share(percent), |_| LATENCY).await;
            let took = rebuild(&reactor, &array, lost).await;
            let wanted_ms = fill_ms(&array) * 100 / u64::from(percent);
            assert_about(&format!("{level:?} at {percent} %"), took, wanted_ms);
            array.stop().await.unwrap();
        });
    }
}

/// Lately, within a fifth; what a job is expected to take from then on, and what it took.
fn assert_rate(what: &str, (shown, wanted): (u64, u64), (expected_ms, took): (u64, Duration)) {
    let took_ms = took.as_millis() as u64;
    println!("{what}: {shown} B/s of {wanted}, {expected_ms} ms expected, {took_ms} ms");
    assert!(shown * 5 >= wanted * 4 && shown * 5 <= wanted * 6, "{what}: {shown} of {wanted} B/s");
    assert!(expected_ms * 5 >= took_ms * 4 && expected_ms * 5 <= took_ms * 6, "{what}: {took_ms}");
}

#[test]
fn the_rate_and_the_end_of_a_rebuild_are_shown() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid5, 5), share(30), |_| LATENCY).await;
        let bytes = fill_ms(&array) * BYTES_PER_SECOND / 1000;
        let midway = Rc::new(Cell::new(None));
        let (seen, looks, shown) = (midway.clone(), reactor.clone(), array.clone());
        reactor.spawn(async move {
            let half = |its: &Progress| its.stripes_done * 2 >= its.stripes_total;
            while seen.get().is_none() {
                looks.sleep(Duration::from_millis(1)).await;
                let progress = shown.status().rebuild.filter(half);
                seen.set(progress.map(|progress| (progress, looks.now())));
            }
        });
        rebuild(&reactor, &array, &[2]).await;
        let (progress, then) = midway.get().unwrap();
        let took = reactor.now().since(then);
        let rates = (progress.bytes_per_second, BYTES_PER_SECOND * 30 / 100);
        assert_rate("rebuild at 30 %", rates, (progress.remaining_ms.unwrap(), took));
        assert!(array.status().worked.rebuild_bytes.abs_diff(bytes) <= bytes / 50);
        array.stop().await.unwrap();
    });
}

fn read_bytes(array: &Rc<Array>) -> u64 {
    let members = array.status().members;
    members.iter().map(|m| m.drive.as_ref().unwrap().counters().read_bytes).sum()
}

#[test]
fn members_that_wait_together_are_filled_from_one_read() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid7, 7), share(100), |_| LATENCY).await;
        let member_bytes = fill_ms(&array) * BYTES_PER_SECOND / 1000;
        let before: u64 = read_bytes(&array);
        let spent: u64 = [1, 4, 6]
            .map(|its: usize| array.status().members[its].drive.as_ref().unwrap().clone())
            .iter()
            .map(|drive| drive.counters().read_bytes)
            .sum();
        rebuild(&reactor, &array, &[1, 4, 6]).await;
        let read = read_bytes(&array) + spent - before;
        // Four of the others, once, and what was filled for one before all had come.
        let once = 4 * member_bytes;
        assert!(read >= once && read < once * 3 / 2, "{read} bytes, once is {once}");
        array.stop().await.unwrap();
    });
}

#[test]
fn under_load_it_leaves_more_to_guests_and_ends() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid5, 5), share(60), |_| LATENCY).await;
        // Before, and then beside the rebuild.
        let guests = Guests::start(&reactor, &array, (8, Asks::Reads), Duration::ZERO);
        reactor.sleep(Duration::from_secs(1)).await;
        let alone = guests.done.take();
        let took = rebuild(&reactor, &array, &[2]).await;
        guests.stop();
        let ms = took.as_millis() as u64;
        let beside = guests.done.get() * 1000 / ms;
        let full_ms = fill_ms(&array);
        println!("{ms} ms, {full_ms} at full speed; guests read {alone}, then {beside} a second");
        assert!(ms > full_ms * 100 / 60 * 3 / 2, "it did not give way: {ms} ms");
        // A tenth of 60 % is 6 %, of drives that guests use, too.
        assert!(ms < full_ms * 100 / 6 * 2, "it starved: {ms} ms");
        assert!(beside * 2 > alone, "guests were left {beside} reads a second of {alone}");
        array.stop().await.unwrap();
    });
}

/// How far a rebuild is durable is said only once all is in place that guests have written by then,
/// which takes long where drives are slow. That is not the rebuild's time.
#[test]
fn a_rebuild_does_not_pay_for_what_guests_write() {
    let took = |asks| {
        let took = Rc::new(Cell::new(Duration::ZERO));
        let taken = took.clone();
        run(move |reactor| async move {
            let slow = Duration::from_millis(20);
            let array = full_array(&reactor, (Level::Raid5, 5), share(60), |_| slow).await;
            let guests = Guests::start(&reactor, &array, (64, asks), Duration::ZERO);
            reactor.sleep(Duration::from_secs(4)).await;
            taken.set(rebuild(&reactor, &array, &[2]).await);
            guests.stop();
            array.stop().await.unwrap();
        });
        took.get()
    };
    let (reads, writes) = (took(Asks::Reads), took(Asks::Writes));
    println!("{reads:?} beside guests that read, {writes:?} beside those that write");
    // It has a tenth of its share at least, and loses little time to what is no work of its own.
    assert!(writes < reads * 11, "{reads:?}, {writes:?}");
}

/// What the journal holds is put in place beside guests, and they wait for the rest of it only.
#[test]
fn guests_that_write_go_on_while_the_journal_is_ended() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid5, 5), share(60), |_| LATENCY).await;
        let guests = Guests::start(&reactor, &array, (8, Asks::Writes), Duration::from_millis(1));
        reactor.sleep(Duration::from_secs(3)).await;
        guests.longest.take();
        let began = reactor.now();
        let pending = array.status().journal.pending_bytes;
        array.set_policy(Policy::Bitmap).await.unwrap();
        assert_eq!(array.status().journal.pending_bytes, 0);
        let took = reactor.now().since(began);
        // Who waited then is served.
        reactor.sleep(took).await;
        guests.stop();
        let longest = guests.longest.get();
        println!("{pending} bytes pending: {took:?}; the longest write {longest:?}");
        assert!(longest * 4 < took, "{longest:?} of {took:?}");
        array.stop().await.unwrap();
    });
}

#[test]
fn a_scrub_has_its_share_too() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid5, 5), share(30), |_| LATENCY).await;
        let began = reactor.now();
        array.start_scrub(false).unwrap();
        let mut midway = None;
        while let ScrubState::Running { progress, .. } = array.status().scrub {
            if progress.stripes_done * 2 >= progress.stripes_total {
                midway.get_or_insert((progress, reactor.now()));
            }
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert_about("scrub at 30 %", reactor.now().since(began), fill_ms(&array) * 100 / 30);
        let (progress, then) = midway.unwrap();
        // Of data, which four of the five have.
        let rates = (progress.bytes_per_second, 4 * BYTES_PER_SECOND * 30 / 100);
        let ends = (progress.remaining_ms.unwrap(), reactor.now().since(then));
        assert_rate("scrub at 30 %", rates, ends);
        assert_eq!(array.status().worked.scrub_bytes, array.capacity());
        array.stop().await.unwrap();
    });
}
