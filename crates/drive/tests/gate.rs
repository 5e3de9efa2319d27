//! Goal: nothing is written after its gate's time, however often it is tried, and nobody waits at a
//! gate in vain.
//! Method: a world with a clock of its own, in which an operation is answered when the test says.
#![allow(clippy::unwrap_used, reason = "a test")]

mod world;

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, DriveIo};
use ashlar_drive::error::DriveError;
use ashlar_drive::gate::Gate;
use ashlar_drive::health::{HealthLimits, HealthState};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use world::{Answer, World, run};

const MS: Duration = Duration::from_millis(1);
const EIO: i32 = 5;

fn gated(reactor: &Reactor, world: &World) -> (Rc<Drive>, Rc<Gate>) {
    let drive = world.drive(reactor, HealthLimits::default());
    let gate = Gate::open_until(reactor.now().after(10 * MS));
    drive.put_behind(gate.clone());
    (drive, gate)
}

fn write(reactor: &Reactor, drive: &Rc<Drive>) -> DriveIo {
    drive.write(0, reactor.buffer(4096).into())
}

#[test]
fn who_is_late_waits_until_the_gate_moves_on() {
    run(async |reactor: Reactor, world: World| {
        let (drive, gate) = gated(&reactor, &world);
        assert_eq!(write(&reactor, &drive).await, Ok(()));
        // This process is stopped for an hour.
        world.pause(Duration::from_secs(3600));
        assert_eq!(drive.read(0, reactor.buffer(4096).into()).await, Ok(()));
        assert_eq!(drive.write_past_gate(0, reactor.buffer(4096).into()).await, Ok(()));
        let begun = world.begun();
        let late = [write(&reactor, &drive), drive.write_zeroes(0, 4096)];
        let (its, moves) = (reactor.clone(), gate.clone());
        reactor.spawn(async move {
            its.sleep(100 * MS).await;
            // Not far enough: they are late again.
            moves.move_on(&its, its.now());
            its.sleep(100 * MS).await;
            moves.move_on(&its, its.now().after(MS));
        });
        let from = reactor.now();
        assert_eq!(join_all(late).await, [Ok(()), Ok(())]);
        assert!(reactor.now().since(from) >= 100 * MS);
        assert_eq!(world.begun(), begun + 2);
        let health = drive.health();
        assert_eq!((health.state, health.write_errors), (HealthState::Healthy, 0));
        // It never moves back.
        gate.move_on(&reactor, reactor.now());
        assert_eq!(write(&reactor, &drive).await, Ok(()));
    });
}

#[test]
fn an_attempt_after_the_time_is_late_although_the_first_was_not() {
    run(async |reactor: Reactor, world: World| {
        let (drive, gate) = gated(&reactor, &world);
        world.answer(Answer::After(20 * MS, Err(EIO)));
        let tried = write(&reactor, &drive);
        let (its, moves) = (reactor.clone(), gate.clone());
        let begun = world.begun();
        reactor.spawn(async move {
            its.sleep(500 * MS).await;
            moves.move_on(&its, its.now().after(MS));
        });
        let from = reactor.now();
        assert_eq!(tried.await, Ok(()));
        assert!(reactor.now().since(from) >= 500 * MS);
        assert_eq!((world.begun(), drive.counters().retries), (begun + 1, 1));
    });
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Shuts,
    TurnsAway,
    Pulls,
}

#[test]
fn nobody_waits_at_a_gate_that_is_shut_or_for_a_drive_that_is_gone() {
    for how in [How::Shuts, How::TurnsAway, How::Pulls] {
        run(async move |reactor: Reactor, world: World| {
            let (drive, gate) = gated(&reactor, &world);
            world.pause(20 * MS);
            let late = [write(&reactor, &drive), drive.write_zeroes(0, 4096)];
            let (its, pulled) = (reactor.clone(), drive.clone());
            let begun = world.begun();
            reactor.spawn(async move {
                its.sleep(MS).await;
                match how {
                    How::Shuts => gate.shut(&its),
                    How::TurnsAway => gate.turn_away(&its),
                    How::Pulls => pulled.pull(),
                }
                // Too late.
                gate.move_on(&its, its.now().after(MS));
            });
            assert_eq!(join_all(late).await, [Err(DriveError::Gone); 2]);
            assert_eq!(world.begun(), begun);
            let after = if how == How::TurnsAway { Ok(()) } else { Err(DriveError::Gone) };
            assert_eq!(write(&reactor, &drive).await, after);
        });
    }
}
