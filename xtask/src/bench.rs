//! `cargo xtask bench REV_A REV_B -- OPTIONS`: builds two commits and measures them in turns.
//!
//! Each commit is built in a worktree of its own under `target/bench`, which is removed again
//! whatever happens: on success, on failure, on Ctrl-C. What was left by a run that was killed, the
//! next one removes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, TERM_SIGNALS};

use crate::cargo;

/// Between two looks at whether a child has ended, or we are to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const NAMES: [&str; 2] = ["a", "b"];

/// A commit's files, gone when this is dropped.
struct Worktree<'a> {
    root: &'a Path,
    path: PathBuf,
}

impl Worktree<'_> {
    fn add<'a>(root: &'a Path, path: PathBuf, revision: &str) -> Result<Worktree<'a>, String> {
        let worktree = Worktree { root, path };
        worktree.remove();
        let added = git(root)
            .args(["worktree", "add", "--quiet", "--force", "--detach"])
            .arg(&worktree.path)
            .arg(revision)
            .status();
        match added {
            Ok(status) if status.success() => Ok(worktree),
            Ok(_) => Err(format!("{revision} cannot be checked out; name a commit, branch or tag")),
            Err(error) => Err(format!("git cannot be started: {error}")),
        }
    }

    fn remove(&self) {
        // There may be neither files nor an entry; what is left after all is told by git later.
        let _ = fs::remove_dir_all(&self.path);
        let _ = git(self.root).args(["worktree", "prune"]).status();
    }
}

impl Drop for Worktree<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

fn git(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(root);
    git
}

/// Set once somebody wants us to end.
struct Interrupted(Arc<AtomicBool>);

impl Interrupted {
    fn watch() -> Result<Interrupted, String> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in TERM_SIGNALS.iter().chain(&[SIGHUP]) {
            signal_hook::flag::register(*signal, flag.clone())
                .map_err(|error| format!("signals cannot be caught: {error}"))?;
        }
        Ok(Interrupted(flag))
    }

    /// Runs a command to its end, or ends it.
    fn run(&self, what: &str, command: &mut Command) -> Result<(), String> {
        let mut child = command.spawn().map_err(|error| format!("{what}: {error}"))?;
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("{what} failed: {status}")),
                Ok(None) if self.0.load(Ordering::Relaxed) => return Err(end(&mut child, what)),
                Ok(None) => std::thread::park_timeout(LOOK_INTERVAL),
                Err(error) => return Err(format!("{what}: {error}")),
            }
        }
    }
}

fn end(child: &mut Child, what: &str) -> String {
    // It may have heard the same signal, and have ended.
    let _ = child.kill();
    let _ = child.wait();
    format!("{what} was interrupted")
}

pub fn run(revisions: [&str; 2], arguments: &[String]) -> ExitCode {
    match compare(revisions, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(revisions: [&str; 2], arguments: &[String]) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = root.canonicalize().map_err(|error| format!("no repository: {error}"))?;
    let place = root.join("target/bench");
    fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    let interrupted = Interrupted::watch()?;
    let mut programs = Vec::new();
    for (name, revision) in NAMES.iter().zip(revisions) {
        programs.push(build(&root, &place, name, revision, &interrupted)?);
    }
    let [a, b] = &programs[..] else { return Err("two revisions make two programs".into()) };
    let mut command = Command::new(a);
    command.args(["bench", "engine"]).args(arguments).arg("--against").arg(b);
    interrupted.run("the comparison", &mut command)
}

/// Builds a commit. The program outlives its worktree.
fn build(
    root: &Path,
    place: &Path,
    name: &str,
    revision: &str,
    interrupted: &Interrupted,
) -> Result<PathBuf, String> {
    let worktree = Worktree::add(root, place.join(format!("tree-{name}")), revision)?;
    // Both commits share what they have in common: crates of others are built once.
    let built = place.join("build");
    let mut command = cargo::command();
    command
        .args(["build", "--quiet", "--release", "--locked", "--package", "ashlar-control"])
        .current_dir(&worktree.path)
        .env("CARGO_TARGET_DIR", &built);
    eprintln!("building {revision}");
    interrupted.run(&format!("the build of {revision}"), &mut command)?;
    let program = place.join(format!("ashlar-{name}"));
    let copied = fs::copy(built.join("release/ashlar"), &program);
    copied.map_err(|error| format!("the program of {revision} cannot be kept: {error}"))?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    //! Goal: no worktree is left behind, whatever happens in it.
    //! Method: a repository of its own; success, a wrong commit, a command that is interrupted.

    use super::*;

    fn repository() -> PathBuf {
        let path = std::env::temp_dir().join(format!("ashlar-bench-git-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        let commands: [&[&str]; 2] = [
            &["init", "--quiet"],
            &[
                "-c",
                "user.name=a",
                "-c",
                "user.email=a@b",
                "commit",
                "--quiet",
                "--allow-empty",
                "-m",
                "first",
            ],
        ];
        for words in commands {
            assert!(git(&path).args(words).status().unwrap().success());
        }
        path
    }

    fn worktrees(root: &Path) -> usize {
        let listed = git(root).args(["worktree", "list"]).output().unwrap();
        String::from_utf8(listed.stdout).unwrap().lines().count()
    }

    #[test]
    fn worktrees_are_removed() {
        let root = repository();
        let path = root.join("tree");
        let worktree = Worktree::add(&root, path.clone(), "HEAD").unwrap();
        assert!(path.join(".git").exists());
        assert_eq!(worktrees(&root), 2);
        // As if that one had been killed: its successor takes the place.
        std::mem::forget(worktree);
        drop(Worktree::add(&root, path.clone(), "HEAD").unwrap());
        assert_eq!((worktrees(&root), path.exists()), (1, false));
        assert!(Worktree::add(&root, path.clone(), "nothing").is_err());
        assert_eq!((worktrees(&root), path.exists()), (1, false));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn an_interrupted_child_is_ended() {
        let interrupted = Interrupted(Arc::new(AtomicBool::new(true)));
        let said = interrupted.run("a long sleep", Command::new("sleep").arg("1000"));
        assert_eq!(said, Err("a long sleep was interrupted".to_owned()));
        let interrupted = Interrupted(Arc::new(AtomicBool::new(false)));
        assert_eq!(interrupted.run("a command", &mut Command::new("true")), Ok(()));
        assert!(interrupted.run("a command", &mut Command::new("false")).is_err());
    }
}
