//! What is going on, for people who wait; on a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

use ashlar_bench::engine::Event;
use ashlar_bench::report::{scaled, time};
use indicatif::{ProgressBar, ProgressStyle};

/// Drawn so seldom that it takes nothing from what is measured.
const DRAW_INTERVAL: Duration = Duration::from_millis(250);

pub struct Progress {
    /// `None`: stderr is no terminal.
    spinner: Option<ProgressBar>,
    /// What stands before each message.
    of: String,
    last: String,
}

impl Progress {
    pub fn new() -> Progress {
        Progress::of("")
    }

    /// `of`: whose turn it is.
    pub fn of(of: &str) -> Progress {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let spinner = ProgressBar::new_spinner().with_style(style);
            spinner.enable_steady_tick(DRAW_INTERVAL);
            spinner
        });
        Progress { spinner, of: of.to_owned(), last: String::new() }
    }

    pub fn update(&mut self, event: &Event) {
        let what = match event {
            Event::SettingUp => "setting up, and writing every block once".to_owned(),
            Event::RoundBegan(number) => format!("round {number}{}", self.last),
            Event::RoundEnded(round) => {
                let (iops, p99) = (scaled(round.all.iops), time(round.all.latency.p99_ns));
                self.last = format!("; the last one: {iops} IOPS, p99 {p99}");
                return;
            }
        };
        self.say(&what);
    }

    pub fn say(&self, what: &str) {
        if let Some(spinner) = &self.spinner {
            spinner.set_message(format!("{}{what}", self.of));
        }
    }

    pub fn end(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
