//! Goal: our own target is measured and verified over every kind of ring that it offers, and a
//! back end that is not there, says nothing, or goes away is named.
//! Method: the target in this process; sockets with something else behind them.

use std::io::Write;
use std::os::unix::net::UnixListener;

use ashlar_format::array_superblock::Level;

use super::*;
use crate::engine::tests::{REQUESTS, asked, under};
use crate::load::Work;

fn initiator() -> InitiatorSpec {
    let asked = Asked { rounds: 1, ..asked(Work::RandRw) };
    // Another than the back end's, where there is one.
    let cpus = std::thread::available_parallelism().unwrap().get();
    InitiatorSpec {
        core: cpus - 1,
        ring: RingKind::Split,
        indirect: true,
        event_index: true,
        queues: 3,
        segments: 1,
        asked,
        size_bytes: None,
        fill: false,
        resume: None,
        pause: Duration::ZERO,
    }
}

fn measured(spec: &InitiatorSpec) -> Result<Report, BenchError> {
    measured_on(&[0], spec)
}

fn measured_on(cores: &[usize], spec: &InitiatorSpec) -> Result<Report, BenchError> {
    let report = run_own(cores, under(Level::Raid5, 3), spec, &mut |_| ())?;
    for round in &report.rounds {
        assert_eq!(round.all.requests, REQUESTS);
        assert_eq!(round.reads.map_or(0, |reads| reads.requests), round.reads_verified);
    }
    assert_eq!(report.setup["size"], (4 << 20).to_string());
    assert_eq!(report.setup["level"], "5");
    Ok(report)
}

#[test]
fn our_own_target_is_verified_whatever_the_ring() {
    for indirect in [false, true] {
        for event_index in [false, true] {
            for segments in [1, 4] {
                let spec = InitiatorSpec { indirect, event_index, segments, ..initiator() };
                let round = measured(&spec).unwrap().rounds[0];
                assert!(round.reads_verified > REQUESTS / 4, "{spec:?}");
                // That of the back end's core.
                assert!(round.cost_per_request.ring_calls.is_some());
            }
        }
    }
}

#[test]
fn queues_on_two_reactors_are_verified_whatever_the_ring() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    for ring in [RingKind::Split, RingKind::Packed] {
        for queues in [2, 3] {
            let spec = InitiatorSpec { ring, queues, ..initiator() };
            let report = measured_on(&[0, 1 % cpus], &spec).unwrap();
            assert!(report.rounds[0].reads_verified > REQUESTS / 4, "{spec:?}");
        }
    }
}

#[test]
fn packed_rings_are_verified_or_refused_honestly() {
    let packed = InitiatorSpec { ring: RingKind::Packed, ..initiator() };
    match measured(&packed) {
        Ok(report) => assert_eq!(report.setup["ring"], "packed"),
        Err(BenchError::BackEnd { error, fix }) => {
            assert_eq!(error, "the back end does not offer packed rings");
            assert_eq!(fix.as_deref(), Some("use --ring split"));
        }
        Err(other) => panic!("{other}"),
    }
}

fn back_end() -> BackEnd {
    BackEnd::start(&[0], under(Level::Raid5, 3), &initiator(), Clock::calibrated()).unwrap()
}

#[test]
fn a_target_that_returns_other_bytes_is_found_out() {
    let (back_end, spec, clock) = (back_end(), initiator(), Clock::calibrated());
    let mut client = Client::connect(&back_end.socket, &spec.wish()).unwrap();
    let load = spec.asked.load(client.capacity());
    client.drive(&mut Run::laying(clock, load), clock).unwrap();
    // Behind its back: block 100 gets the bytes of block 101.
    let (reply, answer) = mpsc::channel();
    let under = back_end.under;
    let letter = move |reactor: &Reactor| {
        let (reactor, its) = (reactor.clone(), reactor.get(under).unwrap());
        reactor.clone().spawn(async move {
            let buffer = reactor.buffer(4096);
            its.read(101 * 4096, buffer.clone().into()).await.unwrap();
            its.write(100 * 4096, buffer.into()).await.unwrap();
            reply.send(()).unwrap();
        });
    };
    back_end.cores[0].sender().send(letter).unwrap();
    answer.recv().unwrap();
    let load = crate::load::LoadSpec { work: Work::Read, ..load };
    let mut run = Run::new(clock, load, true, Box::new(Sample::default));
    run.begin(Limit::Requests(REQUESTS));
    let error = client.drive(&mut run, clock).unwrap_err();
    let said = error.to_string();
    assert!(said.starts_with("wrong data at byte 409600: expected generation 1"), "{said}");
    assert!(said.contains("what belongs at byte 413696"), "{said}");
}

#[test]
fn a_target_that_hangs_up_in_the_middle_is_named() {
    let (back_end, spec, clock) = (back_end(), initiator(), Clock::calibrated());
    let mut client = Client::connect(&back_end.socket, &spec.wish()).unwrap();
    client.drive(&mut Run::laying(clock, spec.asked.load(1 << 20)), clock).unwrap();
    back_end.stop().unwrap();
    let mut run = Run::laying(clock, spec.asked.load(1 << 20));
    let said = client.drive(&mut run, clock).unwrap_err().to_string();
    assert_eq!(said, "the back end hung up with 24 requests under way");
}

fn refused(socket: &Path) -> (String, String) {
    let error = run_at(socket, &initiator(), None, &mut |_| ()).unwrap_err();
    let BenchError::BackEnd { error, fix } = error else { panic!("{error}") };
    (error, fix.unwrap())
}

#[test]
fn whoever_is_no_back_end_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("s");
    let (error, fix) = refused(&socket);
    assert!(error.contains("No such file") && fix.contains("--socket"), "{error}; {fix}");
    let listener = UnixListener::bind(&socket).unwrap();
    let serve = |answer: &'static [u8]| {
        let listener = listener.try_clone().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // It may have hung up: then there is nothing to answer.
            let _ = stream.write_all(answer);
        })
    };
    for answer in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n"] {
        let server = serve(answer);
        let (error, fix) = refused(&socket);
        server.join().unwrap();
        assert!(error.contains("does not speak vhost-user"), "{error}; {fix}");
    }
    // Somebody who listens and does not accept: one front end is there already.
    let (error, fix) = refused(&socket);
    assert!(error.ends_with("does not answer") && fix.contains("one front end"), "{error}; {fix}");
    drop(listener);
    let (error, fix) = refused(&socket);
    assert!(error.contains("refused") && fix.contains("nobody listens"), "{error}; {fix}");
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let spec = initiator();
    assert_eq!(spec.size(8 << 20).unwrap(), 8 << 20);
    assert_eq!(spec.size(1 << 40).unwrap(), SIZE_BYTES_USUAL);
    for (size_bytes, capacity) in [(Some(9 << 20), 8 << 20), (Some(100), 8 << 20), (None, 4096)] {
        let wrong = InitiatorSpec { size_bytes, ..spec };
        assert!(matches!(wrong.size(capacity), Err(BenchError::Spec { .. })), "{size_bytes:?}");
    }
    // 24 requests at a time want more than 24 blocks.
    assert!(spec.size(24 * 4096).is_err() && spec.size(25 * 4096).is_ok());
}
