//! The log, on standard error. What initiators make a target say, as often as they like, is said a
//! few times, and then how often it was not: strangers do not fill a disk.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};

/// Where initiators are served.
const THEIRS: &str = "ashlar_target";
/// Of one place in the code so much is said in a period.
const PERIOD: Duration = Duration::from_secs(10);
const SAID_MAX: u32 = 20;

pub fn start() {
    let filter = EnvFilter::try_from_env("ASHLAR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    registry().with(filter).with(Flood::default()).with(lines).init();
}

/// By what tracing calls each place.
#[derive(Default)]
struct Flood(Mutex<BTreeMap<&'static str, Said>>);

/// Of a place, in its period.
struct Said {
    began: Instant,
    times: u32,
    left_out: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    is_said: bool,
    /// How often it was not in the period before.
    left_out: u64,
}

impl Said {
    fn once_more(&mut self, now: Instant) -> Verdict {
        let mut left_out = 0;
        if now.duration_since(self.began) >= PERIOD {
            left_out = self.left_out;
            *self = Said { began: now, times: 0, left_out: 0 };
        }
        let is_said = self.times < SAID_MAX;
        if is_said {
            self.times += 1;
        } else {
            self.left_out += 1;
        }
        Verdict { is_said, left_out }
    }
}

impl Flood {
    fn judge(&self, place: &'static str, now: Instant) -> Verdict {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let said = places.entry(place).or_insert(Said { began: now, times: 0, left_out: 0 });
        said.once_more(now)
    }
}

impl<S: Subscriber> Layer<S> for Flood {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let its = event.metadata();
        if !its.target().starts_with(THEIRS) {
            return true;
        }
        let Verdict { is_said, left_out } = self.judge(its.name(), Instant::now());
        if left_out > 0 {
            // Not one of theirs: it does not come back here.
            tracing::warn!(left_out, "lines like the next were left out");
        }
        is_said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_by_its_number() {
        let (flood, began) = (Flood::default(), Instant::now());
        let says = |place, ms| flood.judge(place, began + Duration::from_millis(ms));
        let all = (0..1000).map(|ms| says("refused", ms));
        assert_eq!(all.filter(|its| its.is_said).count(), 20);
        assert_eq!(says("other", 500), Verdict { is_said: true, left_out: 0 });
        assert_eq!(says("refused", 9_999), Verdict { is_said: false, left_out: 0 });
        assert_eq!(says("refused", 10_000), Verdict { is_said: true, left_out: 981 });
        assert_eq!(says("refused", 10_001), Verdict { is_said: true, left_out: 0 });
        assert_eq!(says("refused", 99_000), Verdict { is_said: true, left_out: 0 });
    }

    #[test]
    fn only_what_initiators_cause_is_left_out() {
        let written = std::sync::Arc::new(Mutex::new(Vec::new()));
        let its = written.clone();
        let lines = fmt::layer().with_writer(move || Pipe(its.clone())).with_ansi(false);
        tracing::subscriber::with_default(registry().with(Flood::default()).with(lines), || {
            for _ in 0..50 {
                tracing::warn!(target: "ashlar_target::nbd", "theirs");
                tracing::warn!("ours");
            }
        });
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.ends_with(what)).count();
        assert_eq!((count("theirs"), count("ours")), (20, 50));
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
