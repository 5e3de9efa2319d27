//! What commands print: tables for people, JSON for programs.

use std::io::{ErrorKind, Write};

use clap::ValueEnum;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::api::ErrorBody;
use crate::period::now_s;
use crate::refusal::{Answer, Refusal};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Table,
    Json,
}

/// Prints a line. A reader that has gone away (`| head`) is no error.
pub fn say(text: &str) -> Answer<()> {
    is_heard(text).map(|_| ())
}

/// Prints a line. False: its reader has gone away. Whatever else keeps it from being written is an
/// error: a part of it would be taken for all.
pub fn is_heard(text: &str) -> Answer<bool> {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let text = format!("the output could not be written: {error}");
            Err(Refusal::failed(text).fix(
                "make room where it goes, or send it elsewhere; a change that was asked for is \
                 done all the same",
            ))
        }
        written => Ok(written.is_ok()),
    }
}

pub fn json(value: &impl Serialize) -> Answer<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Refusal::failed(format!("no JSON form: {error}")))?;
    say(&text)
}

/// Says on stderr why something was not done, and what mends it.
pub fn complain(output: Output, error: &str, fix: Option<&str>) {
    let text = match output {
        Output::Table => {
            let fix = fix.map(|fix| format!("\nfix: {fix}")).unwrap_or_default();
            format!("error: {error}{fix}")
        }
        Output::Json => {
            let body = ErrorBody { error: error.to_owned(), fix: fix.map(str::to_owned) };
            serde_json::to_string(&body).expect("text has a JSON form")
        }
    };
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints JSON, or what `table` makes of the value.
pub fn show<T: Serialize>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Answer<()> {
    match output {
        Output::Json => json(value),
        Output::Table => say(table(value).trim_end()),
    }
}

/// A table without lines; columns whose head ends in `>` are aligned to the right.
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(heads.iter().map(|head| head.trim_end_matches('>')));
    for (index, head) in heads.iter().enumerate() {
        let column = table.column_mut(index).expect("as many columns as heads");
        column.set_padding((0, 2));
        if head.ends_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The rows of a table, or a line that says that there are none.
pub fn rows(table: &Table, none: &str) -> String {
    if table.row_iter().next().is_none() {
        return none.to_owned();
    }
    let text = table.to_string();
    let lines = text.lines().map(str::trim_end);
    lines.collect::<Vec<_>>().join("\n")
}

/// `-` for what is not known.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// `3 min 20 s` and such.
pub fn duration(ms: u64) -> String {
    let seconds = ms.div_ceil(1000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes} min {} s", seconds % 60),
        (_, _) => format!("{hours} h {minutes} min"),
    }
}

/// `3 h 20 min ago`, of seconds since 1970.
pub fn ago(then_s: u64) -> String {
    let ms = now_s().saturating_sub(then_s).saturating_mul(1000);
    format!("{} ago", duration(ms))
}

/// Nanoseconds, to two or more digits: `87us`, `4.2ms`, `12ms`, `1.3s`.
pub fn time(ns: u64) -> String {
    let (us, ms) = (ns / 1_000, ns / 1_000_000);
    match ns {
        0..10_000 => format!("{us}.{}us", ns / 100 % 10),
        10_000..1_000_000 => format!("{us}us"),
        1_000_000..10_000_000 => format!("{ms}.{}ms", us / 100 % 10),
        10_000_000..1_000_000_000 => format!("{ms}ms"),
        1_000_000_000.. => format!("{}.{}s", ms / 1000, ms / 100 % 10),
    }
}

/// `a, b`, or a dash for none.
pub fn listed(names: &[String]) -> String {
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_printed_short() {
        let cases = [
            (0, "0.0us"),
            (4_200, "4.2us"),
            (87_900, "87us"),
            (1_234_567, "1.2ms"),
            (12_345_678, "12ms"),
            (1_999_999_999, "1.9s"),
            (68_000_000_000, "68.0s"),
        ];
        for (ns, text) in cases {
            assert_eq!(time(ns), text);
        }
    }

    #[test]
    fn durations() {
        let cases = [
            (0, "0 s"),
            (1, "1 s"),
            (59_000, "59 s"),
            (200_000, "3 min 20 s"),
            (7_260_000, "2 h 1 min"),
        ];
        for (ms, text) in cases {
            assert_eq!(duration(ms), text);
        }
    }

    #[test]
    fn tables_are_plain_text() {
        let mut shown = table(&["NAME", "SIZE>"]);
        assert_eq!(rows(&shown, "none"), "none");
        shown.add_row(["a", "1G"]);
        shown.add_row(["long", "512M"]);
        assert_eq!(rows(&shown, "none"), "NAME  SIZE\na       1G\nlong  512M");
    }
}
