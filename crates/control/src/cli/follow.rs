//! `--wait`: follows long work of an array to its end, and shows how far it is.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::api::array::{Array, ArrayState, MemberState, Progress, Scrub, ScrubState};
use crate::cli::array::{pace_text, progress_text};
use crate::client::{Client, path_of};
use crate::refusal::{Answer, Refusal};

const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Between two lines, where there is no terminal to draw on.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Looks without any sign of the work before it counts as ended.
const IDLE_LOOKS_MAX: u32 = 10;

/// What is waited for.
pub enum Work {
    /// These members become trusted.
    Rebuild {
        members: Vec<u8>,
    },
    Scrub,
    Restripe,
}

/// How it stands.
enum Stand {
    Running(Progress),
    /// No sign of it, yet or any more.
    Idle,
    Done,
}

impl Work {
    /// The rebuild that has just begun.
    pub fn rebuild_of(array: &Array) -> Work {
        let rebuilding = array.members.iter().filter(|its| its.state == MemberState::Rebuilding);
        Work::Rebuild { members: rebuilding.map(|its| its.index).collect() }
    }

    fn name(&self) -> &'static str {
        match self {
            Work::Rebuild { .. } => "rebuild",
            Work::Scrub => "scrub",
            Work::Restripe => "restripe",
        }
    }

    fn stand(&self, array: &Array) -> Stand {
        match self {
            Work::Rebuild { members } => match array.rebuild {
                Some(progress) => Stand::Running(progress),
                None if members.iter().all(|index| is_trusted(array, *index)) => Stand::Done,
                None => Stand::Idle,
            },
            Work::Restripe => array.restripe.map_or(Stand::Done, Stand::Running),
            Work::Scrub => match &array.scrub {
                Some(Scrub { state: ScrubState::Finished | ScrubState::Stopped, .. }) => {
                    Stand::Done
                }
                Some(scrub) => scrub.progress.map_or(Stand::Idle, Stand::Running),
                None => Stand::Idle,
            },
        }
    }
}

fn is_trusted(array: &Array, index: u8) -> bool {
    let mut members = array.members.iter();
    members.any(|its| its.index == index && its.state == MemberState::Trusted)
}

/// Waits for the end; the array as it is then.
pub async fn follow(client: &Client, name: &str, work: Work) -> Answer<Array> {
    let mut display = Display::new(work.name());
    let mut idle_looks = 0;
    loop {
        let array: Array = client.get(&path_of("arrays", name)).await?;
        if matches!(array.state, ArrayState::Stopped | ArrayState::Unavailable) {
            let why = array.error.unwrap_or_else(|| "it was stopped".to_owned());
            return Err(Refusal::failed(format!("the {} did not end: {why}", work.name()))
                .fix(format!("ashlar array start {name}")));
        }
        match work.stand(&array) {
            // Nobody knows now; it goes on, once its reactor does.
            _ if array.state == ArrayState::Silent => {}
            Stand::Done => {
                display.end();
                return Ok(array);
            }
            Stand::Running(progress) => {
                idle_looks = 0;
                display.update(&progress);
            }
            Stand::Idle => {
                idle_looks += 1;
                if idle_looks > IDLE_LOOKS_MAX {
                    let what = work.name();
                    let why = array.rebuild_error.unwrap_or_else(|| "without success".to_owned());
                    return Err(Refusal::failed(format!("the {what} ended: {why}"))
                        .fix(format!("`ashlar array show {name}` shows more; then try again")));
                }
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// A bar on a terminal, else a line now and then; always on stderr.
enum Display {
    Bar(ProgressBar),
    Lines { what: &'static str, next: Instant },
}

impl Display {
    fn new(what: &'static str) -> Display {
        if !std::io::stderr().is_terminal() {
            return Display::Lines { what, next: Instant::now() };
        }
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {percent:>3} % {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Display::Bar(ProgressBar::new(0).with_style(style).with_prefix(what))
    }

    fn update(&mut self, progress: &Progress) {
        match self {
            Display::Bar(bar) => {
                bar.set_length(progress.stripes_total);
                bar.set_position(progress.stripes_done);
                bar.set_message(pace_text(progress).unwrap_or_default());
            }
            Display::Lines { what, next } => {
                if Instant::now() >= *next {
                    *next = Instant::now() + LINE_INTERVAL;
                    eprintln!("{what}: {}", progress_text(progress));
                }
            }
        }
    }

    fn end(&self) {
        match self {
            Display::Bar(bar) => bar.finish_and_clear(),
            Display::Lines { what, .. } => eprintln!("{what}: done"),
        }
    }
}
