//! House rules that a machine can check. Each complaint says what to do.
//!
//! A file has a header and at most 800 lines, a function at most 70 lines, a line at most 100
//! columns; no drawers (`utils`, `common`, …); a crate's modules use only those above them in
//! `lib.rs`; `unsafe` lives in listed files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;

const DRAWERS: [&str; 7] = ["util", "utils", "common", "helpers", "misc", "manager", "shared"];

/// Files that may contain `unsafe`. Adding one is a decision for a review.
const UNSAFE_FILES: [&str; 38] = [
    "crates/control/src/handover.rs",
    "crates/target/tests/export/hostile.rs",
    "crates/bench/src/client/memory.rs",
    "crates/bench/src/clock.rs",
    "crates/bench/tests/allocations.rs",
    "crates/reactor/src/arena.rs",
    "crates/reactor/src/buffer.rs",
    "crates/reactor/src/call.rs",
    "crates/reactor/src/clock.rs",
    "crates/reactor/src/copy.rs",
    "crates/reactor/src/cores.rs",
    "crates/reactor/src/driver.rs",
    "crates/reactor/src/mailbox.rs",
    "crates/reactor/src/mapping.rs",
    "crates/reactor/src/nvme/bus.rs",
    "crates/reactor/src/nvme/controller.rs",
    "crates/reactor/src/nvme/generic.rs",
    "crates/reactor/src/nvme/memory.rs",
    "crates/reactor/src/nvme/model.rs",
    "crates/reactor/src/nvme/prp.rs",
    "crates/reactor/src/nvme/vfio.rs",
    "crates/reactor/src/ram.rs",
    "crates/reactor/src/uring.rs",
    "crates/reactor/src/uring/commands.rs",
    "crates/reactor/src/uring/ring.rs",
    "crates/reactor/tests/restricted.rs",
    "crates/raid/examples/parity_bench/isal.rs",
    "crates/raid/src/parity.rs",
    "crates/raid/src/parity/avx2.rs",
    "crates/raid/src/parity/avx512.rs",
    "crates/target/src/ublk/control.rs",
    "crates/target/src/ublk/descriptors.rs",
    "crates/target/src/vhost/bell.rs",
    "crates/target/src/vhost/memory.rs",
    "crates/target/src/vhost/sigbus.rs",
    "crates/target/src/vhost/sigbus/tests.rs",
    "crates/target/tests/export/driver.rs",
    "crates/target/tests/steady/main.rs",
];

/// Checks every Rust file of the workspace.
pub fn run() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut complaints = Vec::new();
    for path in rust_files(&root) {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
        complaints.extend(check_file(&name, &text));
        if name.ends_with("src/lib.rs") || name.ends_with("src/main.rs") {
            complaints.extend(check_layers(&path, &name, &text));
        }
    }
    complaints.iter().for_each(|complaint| eprintln!("{complaint}"));
    if complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn rust_files(root: &Path) -> Vec<PathBuf> {
    let mut folders = vec![root.join("crates"), root.join("xtask")];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    if !text.starts_with("//!") {
        out.push(format!("{name}: begin with //! and say what the file is for"));
    }
    if lines.len() > FILE_LINES_MAX {
        out.push(format!("{name}: {} lines; split it, one noun a file", lines.len()));
    }
    let stem = Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or("");
    if DRAWERS.contains(&stem) {
        out.push(format!("{name}: a drawer; name it after what is in it"));
    }
    for (number, line) in lines.iter().enumerate() {
        if line.chars().count() > LINE_COLUMNS_MAX {
            out.push(format!("{name}:{}: longer than {LINE_COLUMNS_MAX} columns", number + 1));
        }
        let code = line.split("//").next().unwrap_or("");
        let is_unsafe = ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|u| code.contains(u));
        if is_unsafe && !name.starts_with("xtask/") && !UNSAFE_FILES.contains(&name) {
            out.push(format!("{name}:{}: unsafe, in a file not listed for it", number + 1));
        }
        if line.to_lowercase().contains(concat!("// safe", " because")) {
            out.push(format!("{name}:{}: name the invariant and who keeps it", number + 1));
        }
    }
    out.extend(check_functions(name, &lines));
    out
}

/// Relies on rustfmt: a function begins with `fn` and ends at a brace of the same indentation.
fn check_functions(name: &str, lines: &[&str]) -> Vec<String> {
    let mut out = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        let words: Vec<&str> = code.split_whitespace().take(5).collect();
        let is_function = words.contains(&"fn") && !code.starts_with("//") && !code.contains('"');
        if !is_function || code.ends_with(';') {
            continue;
        }
        let end = format!("{}}}", " ".repeat(indent));
        let length = lines[start..].iter().position(|line| *line == end).map_or(1, |n| n + 1);
        if length > FUNCTION_LINES_MAX {
            out.push(format!("{name}:{}: a function of {length} lines", start + 1));
        }
    }
    out
}

/// A module uses only modules above it in `lib.rs`.
fn check_layers(path: &Path, name: &str, text: &str) -> Vec<String> {
    let modules: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("pub ").strip_prefix("mod "))
        .filter_map(|rest| rest.strip_suffix(';'))
        .collect();
    let mut out = Vec::new();
    let folder = path.parent().unwrap_or(path);
    for (order, module) in modules.iter().enumerate() {
        let Ok(body) = fs::read_to_string(folder.join(format!("{module}.rs"))) else { continue };
        for lower in &modules[order + 1..] {
            let uses = format!("use crate::{lower}::");
            if body.lines().any(|line| line.trim_start_matches("pub ").starts_with(&uses)) {
                out.push(format!("{name}: {module} uses {lower}, which stands below it"));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_it_looks_for() {
        let long_function = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(70));
        for (name, text, what) in [
            ("a.rs", "fn f() {}\n".to_owned(), "begin with"),
            ("a.rs", format!("//! A.\n{long_function}"), "function of 72 lines"),
            ("a.rs", format!("//! A.\n// {}\n", "x".repeat(100)), "columns"),
            ("a.rs", "//! A.\nlet x = unsafe { y() };\n".to_owned(), "unsafe"),
            ("src/utils.rs", "//! A.\n".to_owned(), "drawer"),
            ("a.rs", format!("//! A.\n{}", "\n".repeat(800)), "801 lines"),
        ] {
            let complaints = check_file(name, &text);
            assert!(complaints.iter().any(|c| c.contains(what)), "{what}: {complaints:?}");
        }
        assert!(check_file("a.rs", "//! A.\n\nfn f() {\n    g();\n}\n").is_empty());
    }

    #[test]
    fn finds_a_module_that_looks_down() {
        let folder = std::env::temp_dir().join(format!("ashlar-tidy-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("high.rs"), "use crate::low::Thing;\n").unwrap();
        fs::write(folder.join("low.rs"), "\n").unwrap();
        let check = |lib: &str| check_layers(&folder.join("lib.rs"), "lib.rs", lib);
        assert!(check("mod low;\npub mod high;\n").is_empty());
        assert_eq!(check("mod high;\nmod low;\n").len(), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_workspace_is_tidy() {
        assert_eq!(run(), ExitCode::SUCCESS);
    }
}
