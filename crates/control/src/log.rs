//! The log, on standard error. What initiators make a target say, as often as they like, and what
//! a bad drive does again and again, is said a few times, and then how often it was not: neither
//! fills a disk.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};

/// Where initiators are served, and drives fail what was asked.
const OFTEN: [&str; 2] = ["ashlar_target", "ashlar_drive"];
/// Of one place in the code so much is said in a period.
const PERIOD: Duration = Duration::from_secs(10);
const SAID_MAX: u32 = 20;

pub fn start() {
    let filter = EnvFilter::try_from_env("ASHLAR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    registry().with(filter).with(Sluice(&FLOOD)).with(lines).init();
}

/// Says of periods that have ended what was left out in them.
pub fn tell_left_out() {
    for (first, lines) in FLOOD.ended(Instant::now()) {
        tracing::warn!(lines, first = first.as_str(), "lines of one kind were left out");
    }
}

static FLOOD: Flood = Flood(Mutex::new(BTreeMap::new()));

/// By what tracing calls each place.
#[derive(Default)]
struct Flood(Mutex<BTreeMap<&'static str, Said>>);

/// Of a place, in its period.
struct Said {
    began: Instant,
    times: u32,
    left_out: u64,
    /// What the first of these says: a place in the code means nothing to an operator.
    first_left_out: String,
}

impl Said {
    fn new(began: Instant) -> Said {
        Said { began, times: 0, left_out: 0, first_left_out: String::new() }
    }
}

impl Flood {
    fn places(&self) -> MutexGuard<'_, BTreeMap<&'static str, Said>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line of a place is said; `line`: what it says.
    fn lets_through(
        &self,
        place: &'static str,
        now: Instant,
        line: impl FnOnce() -> String,
    ) -> bool {
        let mut places = self.places();
        let said = places.entry(place).or_insert_with(|| Said::new(now));
        if said.left_out == 0 && now.duration_since(said.began) >= PERIOD {
            (said.began, said.times) = (now, 0);
        }
        let is_said = said.times < SAID_MAX;
        match is_said {
            true => said.times += 1,
            false => {
                if said.left_out == 0 {
                    said.first_left_out = line();
                }
                said.left_out += 1;
            }
        }
        is_said
    }

    /// Of each place whose period has ended, the first line that was left out, and how many were.
    /// It begins anew.
    fn ended(&self, now: Instant) -> Vec<(String, u64)> {
        let is_over = |_: &&str, its: &mut Said| now.duration_since(its.began) >= PERIOD;
        let over = self.places().extract_if(.., is_over).collect::<Vec<_>>();
        let left_out = over.into_iter().map(|(_, its)| (its.first_left_out, its.left_out));
        left_out.filter(|(_, lines)| *lines > 0).collect()
    }
}

/// What an event says, and then its other fields, as far as a line has room for them.
#[derive(Default)]
struct Message(String);

const FIELDS_BYTES_MAX: usize = 300;

impl Message {
    fn of(event: &Event<'_>) -> String {
        let mut message = Message::default();
        event.record(&mut message);
        message.0
    }
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.insert_str(0, &format!("{value:?}"));
        } else if self.0.len() < FIELDS_BYTES_MAX {
            let value: String = format!("{value:?}").chars().take(FIELDS_BYTES_MAX).collect();
            self.0.push_str(&format!(" {}={value}", field.name()));
        }
    }
}

/// What may not pass is not said.
struct Sluice(&'static Flood);

impl<S: Subscriber> Layer<S> for Sluice {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let its = event.metadata();
        // An error is of the daemon itself, and there are as many as it has parts.
        let is_often = OFTEN.iter().any(|often| its.target().starts_with(often));
        let may_flood = is_often && *its.level() > Level::ERROR;
        !may_flood || self.0.lets_through(its.name(), Instant::now(), || Message::of(event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_by_its_number() {
        let (flood, began) = (Flood::default(), Instant::now());
        let at = |ms| began + Duration::from_millis(ms);
        let says = |place, ms| flood.lets_through(place, at(ms), || format!("{place} at {ms}"));
        assert_eq!((0..1000).filter(|ms| says("refused", *ms)).count(), 20);
        assert!(says("other", 500) && !says("refused", 9_999));
        assert!(flood.ended(at(9_999)).is_empty());
        // Nobody has told of these yet.
        assert!(!says("refused", 10_000));
        assert_eq!(flood.ended(at(10_000)), [("refused at 20".to_owned(), 982)]);
        assert!(flood.ended(at(99_000)).is_empty());
        assert_eq!((0..30).filter(|_| says("refused", 99_000)).count(), 20);
        assert_eq!(flood.ended(at(109_000)), [("refused at 99000".to_owned(), 10)]);
    }

    #[test]
    fn only_what_others_cause_is_left_out() {
        static EMPTY: Flood = Flood(Mutex::new(BTreeMap::new()));
        let written = std::sync::Arc::new(Mutex::new(Vec::new()));
        let its = written.clone();
        let lines = fmt::layer().with_writer(move || Pipe(its.clone())).with_ansi(false);
        tracing::subscriber::with_default(registry().with(Sluice(&EMPTY)).with(lines), || {
            for _ in 0..50 {
                tracing::warn!(target: "ashlar_target::nbd", "theirs");
                tracing::error!(target: "ashlar_target::nbd", "grave");
                tracing::warn!("ours");
            }
        });
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.ends_with(what)).count();
        assert_eq!((count("theirs"), count("grave"), count("ours")), (20, 50, 50));
        let later = Instant::now() + PERIOD;
        assert_eq!(EMPTY.ended(later), [("theirs".to_owned(), 30)]);
    }

    struct Pipe(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
}
