//! How commands print what is asked of a reactor, an array or an export.

use crate::api::traffic::{Requests, Traffic};
use crate::cli::output::{or_dash, time};

/// Lines of a page about one thing, whose first column is so wide.
pub fn lines(its: &Traffic, width: usize) -> Vec<String> {
    let kinds = [("read", &its.reads), ("write", &its.writes), ("flush", &its.flushes)];
    let mut lines: Vec<String> =
        kinds.iter().map(|(what, its)| format!("{what:<width$}{}", requests(its))).collect();
    lines.push(format!(
        "{:<width$}{} now, {} lately, {} at most",
        "depth",
        or_dash(its.depth),
        tenths(its.depth_mean_milli),
        or_dash(its.depth_max)
    ));
    lines
}

/// `1200/s, 4.9 MB/s, p50 87us, p99 1.2ms, p99.9 3.0ms, max 12ms lately`
fn requests(its: &Requests) -> String {
    if its.max_ns == 0 && its.per_second == 0 {
        return "none lately".to_owned();
    }
    let [p50, p99, p999, max] = [its.p50_ns, its.p99_ns, its.p999_ns, its.max_ns].map(time);
    let bytes = match its.bytes_per_second {
        0 => String::new(),
        bytes => format!(" {} MB/s,", megabytes(bytes)),
    };
    format!("{}/s,{bytes} p50 {p50}, p99 {p99}, p99.9 {p999}, max {max} lately", its.per_second)
}

/// Of 10^6 bytes, to a tenth.
pub fn megabytes(bytes: u64) -> String {
    tenths(bytes / 1000)
}

/// Thousandths, to a tenth.
pub fn tenths(milli: u64) -> String {
    format!("{}.{}", milli / 1000, milli / 100 % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_of_nothing() {
        let mut its = Traffic::default();
        assert_eq!(lines(&its, 10)[0], "read      none lately");
        its.flushes = Requests { per_second: 3, p99_ns: 1_200_000, max_ns: 2, ..its.flushes };
        let said = "flush     3/s, p50 0.0us, p99 1.2ms, p99.9 0.0us, max 0.0us lately";
        assert_eq!(lines(&its, 10)[2], said);
        (its.depth, its.depth_mean_milli) = (Some(7), 2449);
        assert_eq!(lines(&its, 8)[3], "depth   7 now, 2.4 lately, - at most");
    }
}
