//! Another program takes the place of this one, while guests wait for a moment.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ashlar_target::handed::Handed;

use crate::api::upgrade::{UpgradeRequest, Upgrades};
use crate::engine;
use crate::handover::{self, CONSENT, FORMAT, Handover};
use crate::host::{Host, Medium, Serving};
use crate::refusal::{Answer, Refusal};
use crate::served::{Served, beside};

/// The option that asks a program whether it would take over, which it answers by its status.
const CHECK_OPTION: &str = "--check-handover";
/// Bounds the question, in seconds.
const CHECK_SECONDS_MAX: &str = "10";

impl Host {
    /// Asks for an upgrade, after the program was asked whether it can take over. Then the daemon's
    /// main task is told. What is returned is from before.
    pub async fn upgrade(&self, request: UpgradeRequest) -> Answer<Upgrades> {
        let _change = self.begin().await?;
        self.check_memory()?;
        self.check_reactors().await?;
        if !request.force {
            self.check_front_ends().await?;
        }
        let binary = request.binary.unwrap_or_else(|| self.program.clone());
        let asked = binary.clone();
        beside(move || check(&asked)).await??;
        tracing::info!(binary = %binary.display(), "upgrading");
        self.wanted.send_replace(Some(binary));
        Ok(self.upgrades())
    }

    pub fn upgrades(&self) -> Upgrades {
        self.look(|state| state.upgrades.clone())
    }

    /// Waits until an upgrade is wanted.
    pub async fn upgrade_wanted(&self) -> PathBuf {
        let mut wanted = self.wanted.subscribe();
        let found = wanted.wait_for(Option::is_some).await.map(|binary| binary.clone());
        match found {
            Ok(Some(binary)) => binary,
            // The sender is ours.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Memory ends with the process.
    fn check_memory(&self) -> Answer<()> {
        let found = self.look(|state| {
            let is_memory = |medium: &Medium| matches!(medium, Medium::Memory { .. });
            let mut drives = state.drives.iter();
            let used = drives.find(|(_, its)| its.used_by.is_some() && is_memory(&its.medium));
            used.map(|(name, _)| name.clone())
        });
        match found {
            Some(name) => Err(Refusal::conflict(format!(
                "drive {name} is memory of this process, and its array would lose it"
            ))
            .fix("stop the arrays on drives of memory first")),
            None => Ok(()),
        }
    }

    /// Arrays of a reactor that hangs cannot be brought to rest: guests would be cut off, and wait
    /// for ever.
    async fn check_reactors(&self) -> Answer<()> {
        for core in &self.cores {
            engine::look(core.sender(), |_| ()).await.map_err(|refusal| {
                let text =
                    format!("CPU {} cannot hand its work over: {}", core.cpu(), refusal.error);
                Refusal { error: text, ..refusal }
            })?;
        }
        Ok(())
    }

    /// Some kinds of exports end with the process, and whoever uses them gets errors.
    async fn check_front_ends(&self) -> Answer<()> {
        let known = self.look(|state| state.catalog.exports.clone());
        for (name, known) in known.iter().filter(|(_, known)| known.front.breaks_at_upgrade()) {
            let Some((served, _)) = self.served(name) else { continue };
            // None of these kinds is there without the daemon: it knows all of their users.
            if let Some(usage) = served.used().await {
                let place = known.front.place(name);
                return Err(Refusal::conflict(format!(
                    "export {name}, {place}, {usage}, and cannot be handed to another program"
                ))
                .fix("end its use first, or use --force: its users get I/O errors"));
            }
        }
        Ok(())
    }

    /// Brings all to rest, as for a stop; exports stay open for the next process.
    pub async fn hand_over(&self) -> BTreeMap<String, Handed<OwnedFd>> {
        let (exports, waiting) = {
            let _turn = self.changes.lock().await;
            self.tell_exports_of_stop(|_| true).await;
            self.look(|state| {
                (state.stopping, state.upgrading) = (true, true);
                (std::mem::take(&mut state.exports), std::mem::take(&mut state.waiting))
            })
        };
        // All at once: one that takes its time shall not make all others wait for longer.
        let leave = |served: Served| tokio::spawn(async move { served.hand_over().await });
        let leave_volume = |(name, Serving { home, parts, served, .. })| {
            (name, leave(served), Some((home, parts)))
        };
        let leaving: Vec<_> = exports.into_iter().map(leave_volume).collect();
        let waiting: Vec<_> =
            waiting.into_iter().map(|(name, served)| (name, leave(served), None)).collect();
        let mut handed = BTreeMap::new();
        for (name, leaving, volume) in leaving.into_iter().chain(waiting) {
            if let Ok(Some(its)) = leaving.await {
                handed.insert(name, its);
            }
            if let Some((home, parts)) = volume {
                self.withdraw_volumes(home, parts).await;
            }
        }
        // What went wrong is logged, and the next process says it again.
        let _ = self.shut_down().await;
        handed
    }

    /// Before [`Host::restore`]: what the process before left.
    pub fn accept_handover(&self, exports: BTreeMap<String, Handed<OwnedFd>>) {
        self.look(|state| state.handed = exports);
    }

    /// After it. Exports that were not taken up again are closed.
    pub fn taken_over(&self, handover: &Handover) {
        let paused = handover::now().saturating_sub(handover.began);
        let left = self.look(|state| std::mem::take(&mut state.handed));
        for name in left.keys() {
            tracing::error!(export = name, "could not be taken over: its guest is disconnected");
        }
        let paused_ms = u64::try_from(paused.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(paused_ms, version = env!("CARGO_PKG_VERSION"), "took over");
        self.look(|state| {
            state.upgrades.count = handover.count;
            state.upgrades.paused_ms = Some(paused_ms);
            state.upgrades.error.clone_from(&handover.error);
        });
    }
}

/// The file that this program was started from, or what has taken its place since: after a program
/// that did not take over, this one runs from a file that may be gone.
pub(super) fn own_program() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    if program.exists() { program } else { without_mark(program) }
}

/// Linux marks the name of a file that was removed.
fn without_mark(program: PathBuf) -> PathBuf {
    let name = program.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    name.map(|name| PathBuf::from(OsStr::from_bytes(name))).unwrap_or(program)
}

/// Whether a program would take over: it is started with all that this one was started with.
fn check(binary: &Path) -> Answer<()> {
    let shown = binary.display();
    let fix = "the daemon goes on as it is; name another --binary";
    if !binary.is_file() {
        return Err(Refusal::unknown(format!("there is no program {shown}")).fix(fix));
    }
    let output = Command::new("timeout")
        .arg(CHECK_SECONDS_MAX)
        .arg(binary)
        .args(handover::arguments())
        .args([CHECK_OPTION, &FORMAT.to_string()])
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(|error| {
        Refusal::failed(format!("{shown} cannot be asked whether it can take over: {error}"))
            .fix(fix)
    })?;
    // Many a program would do nothing, and say so by its status.
    let consents = String::from_utf8_lossy(&output.stdout).contains(CONSENT);
    if output.status.success() && consents {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().next().unwrap_or("it says nothing");
    let said = said.trim_start_matches("error: ");
    Err(Refusal::conflict(format!("{shown} cannot take over: {said}")).fix(fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_removed_is_known_by_its_place() {
        let place = |name: &str| without_mark(PathBuf::from(name));
        assert_eq!(place("/usr/bin/ashlar (deleted)"), Path::new("/usr/bin/ashlar"));
        assert_eq!(place("/usr/bin/ashlar"), Path::new("/usr/bin/ashlar"));
        assert!(own_program().is_file());
    }
}
