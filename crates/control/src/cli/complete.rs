//! Completion in shells: commands and options, and the names that a running daemon knows.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::CommandFactory;
use clap_complete::CompleteEnv;
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::api::drive::DriveState;
use crate::api::export::NvmeNamespace;
use crate::cli::output::say;
use crate::cli::{Cli, Shell};
use crate::client::Client;
use crate::refusal::{Answer, Refusal};

/// Set by the shell code that `completions` prints, when it asks what may follow.
const VARIABLE: &str = "ASHLAR_COMPLETE";
/// A person waits at the prompt: no names are better than late ones.
const PATIENCE: Duration = Duration::from_millis(500);

/// Answers a shell and ends the process, if it is a shell that asks.
pub fn complete_from_environment() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}

pub fn print_registration(shell: Shell) -> Answer<()> {
    let name = match shell {
        Shell::Bash => "bash",
        Shell::Zsh => "zsh",
        Shell::Fish => "fish",
    };
    let mut text = Vec::new();
    let shells = Shells::builtins();
    let completer = shells.completer(name).expect("the library knows these shells");
    completer
        .write_registration(VARIABLE, "ashlar", "ashlar", "ashlar", &mut text)
        .map_err(|error| Refusal::failed(format!("no completions: {error}")))?;
    say(String::from_utf8_lossy(&text).trim_end())
}

pub fn drives() -> Vec<CompletionCandidate> {
    names("/v1/drives")
}

/// Drives that no running array has, and that are no spares.
pub fn unused_drives() -> Vec<CompletionCandidate> {
    let drives: Vec<Kept> = ask("/v1/drives");
    let is_unused = |its: &Kept| matches!(its.state, DriveState::Free | DriveState::Replaced);
    let unused = drives.into_iter().filter(is_unused);
    unused.map(|its| CompletionCandidate::new(its.name)).collect()
}

/// RAID levels; of N+M two that are usual.
pub fn levels() -> Vec<CompletionCandidate> {
    let levels = ["0", "1", "5", "6", "7.3", "10", "50", "60", "70", "4+2", "10+4"];
    levels.into_iter().map(CompletionCandidate::new).collect()
}

pub fn arrays() -> Vec<CompletionCandidate> {
    names("/v1/arrays")
}

pub fn spares() -> Vec<CompletionCandidate> {
    names("/v1/spares")
}

pub fn volumes() -> Vec<CompletionCandidate> {
    names("/v1/volumes")
}

pub fn exports() -> Vec<CompletionCandidate> {
    names("/v1/exports")
}

/// Names of NVMe subsystems.
pub fn subsystems() -> Vec<CompletionCandidate> {
    let exports: Vec<Exported> = ask("/v1/exports");
    let names: BTreeSet<String> =
        exports.into_iter().filter_map(|its| its.nvme).map(|its| its.nqn).collect();
    names.into_iter().map(CompletionCandidate::new).collect()
}

#[derive(Deserialize)]
struct Exported {
    nvme: Option<NvmeNamespace>,
}

#[derive(Deserialize)]
struct Kept {
    name: String,
    state: DriveState,
}

#[derive(Deserialize)]
struct Named {
    #[serde(alias = "drive")]
    name: String,
}

/// Names of a noun.
fn names(path: &str) -> Vec<CompletionCandidate> {
    let named: Vec<Named> = ask(path);
    named.into_iter().map(|named| CompletionCandidate::new(named.name)).collect()
}

/// A list from the daemon; an empty one if it does not answer at once.
fn ask<T: DeserializeOwned>(path: &str) -> Vec<T> {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let client = Client::new(&socket());
    let asked = runtime
        .block_on(async { tokio::time::timeout(PATIENCE, client.get::<Vec<T>>(path)).await });
    asked.ok().and_then(Result::ok).unwrap_or_default()
}

/// The socket named on the line that is being completed, else as usual.
fn socket() -> PathBuf {
    let words: Vec<OsString> = std::env::args_os().collect();
    let named = words.windows(2).find(|pair| pair[0] == "--socket").map(|pair| pair[1].clone());
    let named = named.or_else(|| std::env::var_os("ASHLAR_SOCKET"));
    named.map_or_else(|| PathBuf::from("/run/ashlar/ashlar.sock"), PathBuf::from)
}
