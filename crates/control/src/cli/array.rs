//! `ashlar array …`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::api::Done;
use crate::api::array::{
    Array, ArrayCounters, ArrayCreate, ArrayGrow, ArrayGrown, ArrayReplace, ArrayScrub, ArrayState,
    BadBlocks, JournalFill, JournalReplay, Member, MemberState, Progress, RebuildStarted,
    ScanResult,
};
use crate::api::drive::DriveHistory;
use crate::cli::complete;
use crate::cli::drive::{health_name, with_notes};
use crate::cli::follow::{Work, follow};
use crate::cli::output::{Output, complain, duration, or_dash, rows, show, table, time};
use crate::cli::scrub;
use crate::cli::settings::{self, SettingsOptions};
use crate::cli::traffic;
use crate::client::{Client, path_of};
use crate::level::{LEVELS, is_written_like_one};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;
use crate::snapshot::percent;

/// Places of bad blocks that are named; JSON has all.
const BAD_PLACES_SHOWN: usize = 3;

#[derive(Subcommand)]
pub enum Command {
    /// Make an array of attached drives
    Create(Box<Create>),
    /// Set what can be set while an array runs; without options: show it
    Set(Set),
    /// All arrays
    List,
    /// One array: members, long work, counters
    Show {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
    },
    /// Delete an array; its drives are blank afterwards
    Delete {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
        /// Also if it holds volumes, or does not run
        #[arg(long)]
        force: bool,
    },
    /// Give a member another drive, and rebuild onto it
    Replace(Replace),
    /// Take drives that came back in again, and rebuild onto them
    Rebuild {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
        /// Show progress until it is done
        #[arg(long)]
        wait: bool,
    },
    /// Add drives; or use those that are larger by now than they were, or than those they replaced
    Grow(Grow),
    /// Read and verify everything
    Scrub {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
        /// Where it cannot be told which chunk is wrong, write parity or copies anew, to agree
        /// with the data or the first copy; what surely is wrong is always mended
        #[arg(long, conflicts_with = "stop")]
        repair: bool,
        /// End the scrub that runs instead; the next one begins from the start
        #[arg(long, conflicts_with = "wait")]
        stop: bool,
        /// Show progress until it is done; the status is 1 if something was found and not mended
        #[arg(long)]
        wait: bool,
    },
    /// Flush and stop an array and its exports
    Stop {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
        /// Also while it is in use
        #[arg(long)]
        force: bool,
    },
    /// Have an array here only while guests need it: one that moves takes it along
    OnDemand {
        /// Its name
        #[arg(add = ArgValueCandidates::new(complete::arrays))]
        name: String,
        /// No more; it stays as it is
        #[arg(long)]
        off: bool,
    },
    /// Start a stopped array, or all that can be found
    Start(Start),
}

#[derive(Args)]
pub struct Create {
    /// Name of the new array
    name: String,
    /// RAID level: 0, 1, 5, 6, 7.3, 10, 50, 60, 70, or N+M: N data and M parity chunks a stripe
    #[arg(long, value_parser = level_text, add = ArgValueCandidates::new(complete::levels))]
    level: String,
    /// Names of attached drives, in the order of the members
    #[arg(long, value_delimiter = ',', required = true, value_name = "DRIVE,…")]
    #[arg(add = ArgValueCandidates::new(complete::unused_drives))]
    drives: Vec<String>,
    /// 16K to 1M, a power of two; left out: 64K
    #[arg(long)]
    chunk: Option<Size>,
    /// Copies of each block at level 1 (left out: one a drive) and 10 (left out: two)
    #[arg(long)]
    copies: Option<u8>,
    /// Drives of one group at levels 50, 60 and 70; left out: there are two groups
    #[arg(long, value_name = "DRIVES")]
    group_size: Option<u8>,
    /// Keep a checksum of every block: what a drive returns wrong is found, named and mended
    #[arg(long)]
    integrity: bool,
    /// Also take drives that carry another array's label
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    settings: SettingsOptions,
}

#[derive(Args)]
pub struct Set {
    /// Its name
    #[arg(add = ArgValueCandidates::new(complete::arrays))]
    name: String,
    #[command(flatten)]
    settings: SettingsOptions,
}

#[derive(Args)]
pub struct Replace {
    /// Its name
    #[arg(add = ArgValueCandidates::new(complete::arrays))]
    name: String,
    /// Number of the member
    #[arg(long, required_unless_present = "old", conflicts_with = "old")]
    member: Option<u8>,
    /// Name or uuid of the drive that is, or was, the member
    #[arg(long, value_name = "DRIVE", add = ArgValueCandidates::new(complete::drives))]
    old: Option<String>,
    /// Name of the attached drive that takes its place
    #[arg(long, value_name = "DRIVE", add = ArgValueCandidates::new(complete::unused_drives))]
    new: String,
    /// Pull the old drive if it is in use; take a new drive that carries a label
    #[arg(long)]
    force: bool,
    /// Show progress until the rebuild is done
    #[arg(long)]
    wait: bool,
}

#[derive(Args)]
pub struct Grow {
    /// Its name
    #[arg(add = ArgValueCandidates::new(complete::arrays))]
    name: String,
    /// Names of attached drives that become members: everything is moved to stripes over all of
    /// them while the array serves (levels 0, 5, 6, 7.3, N+M; level 10: as many as it has copies)
    #[arg(long, value_delimiter = ',', value_name = "DRIVE,…")]
    #[arg(add = ArgValueCandidates::new(complete::unused_drives))]
    add: Vec<String>,
    /// Also take drives that carry another array's label
    #[arg(long, requires = "add")]
    force: bool,
    /// Show progress until everything is moved
    #[arg(long, requires = "add")]
    wait: bool,
}

#[derive(Args)]
pub struct Start {
    /// Its name
    #[arg(required_unless_present = "scan", conflicts_with = "scan")]
    #[arg(add = ArgValueCandidates::new(complete::arrays))]
    name: Option<String>,
    /// Start every array whose label is on an attached drive
    #[arg(long)]
    scan: bool,
    /// Also if absent members may hold newer data, if a drive holds a copy of before that the
    /// others need, or if another host uses the array, or may do so unseen, as no member's lease
    /// can be read: what is newer there is lost
    #[arg(long)]
    force: bool,
}

pub fn level_text(text: &str) -> Result<String, String> {
    if is_written_like_one(text) { Ok(text.to_owned()) } else { Err(format!("use {LEVELS}")) }
}

pub async fn run(command: Command, client: &Client, output: Output) -> Answer<ExitCode> {
    match command {
        Command::Create(create) => {
            let array: Array = client.post("/v1/arrays", &create.request()?).await?;
            show(output, &array, |array| {
                let size = Size(array.capacity_bytes.unwrap_or(0));
                format!("array {} created: {}, {size}", array.name, layout(array))
            })?;
        }
        Command::Set(Set { name, settings }) => {
            let path = format!("{}/set", path_of("arrays", &name));
            let array: Array = client.post(&path, &settings.change()).await?;
            show(output, &array, |array| settings_lines(array).join("\n"))?;
        }
        Command::List => {
            let arrays: Vec<Array> = client.get("/v1/arrays").await?;
            show(output, &arrays, |arrays| arrays_table(arrays))?;
        }
        Command::Show { name } => {
            let array: Array = client.get(&path_of("arrays", &name)).await?;
            show(output, &array, details)?;
        }
        Command::Delete { name, force } => {
            let path = format!("{}?force={force}", path_of("arrays", &name));
            let done: Done = client.delete(&path).await?;
            let line = format!("array {name} deleted");
            show(output, &done, |done| with_notes(&line, &done.notes))?;
        }
        Command::Replace(replace) => run_replace(replace, client, output).await?,
        Command::Rebuild { name, wait } => run_rebuild(&name, wait, client, output).await?,
        Command::Grow(grow) => run_grow(grow, client, output).await?,
        Command::Scrub { name, repair, stop, wait } => {
            let request = ArrayScrub { repair, stop };
            return scrub::run(&name, request, wait, client, output).await;
        }
        Command::Stop { name, force } => {
            let path = format!("{}/stop?force={force}", path_of("arrays", &name));
            let array: Array = client.post(&path, &()).await?;
            let left: Vec<String> = array.error.iter().cloned().collect();
            show(output, &array, |_| with_notes(&format!("array {name} stopped"), &left))?;
        }
        Command::OnDemand { name, off } => {
            let path = format!("{}/on-demand?on={}", path_of("arrays", &name), !off);
            let array: Array = client.post(&path, &()).await?;
            let how = if off { "not on demand any more" } else { "on demand" };
            show(output, &array, |array| format!("array {name} is {how}: {}", shown_state(array)))?;
        }
        Command::Start(Start { name: Some(name), force, .. }) => {
            let path = format!("{}/start?force={force}", path_of("arrays", &name));
            let array: Array = client.post(&path, &()).await?;
            show(output, &array, started)?;
        }
        Command::Start(Start { name: None, force, .. }) => {
            let path = format!("/v1/arrays/scan?force={force}");
            let result: ScanResult = client.post(&path, &()).await?;
            return show_scan(&result, output);
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Create {
    fn request(self) -> Answer<ArrayCreate> {
        let chunk_bytes = match self.chunk {
            Some(size) => Some(u32::try_from(size.0).map_err(|_| {
                Refusal::invalid(format!("{size} is no chunk size")).fix("use 16K to 1M")
            })?),
            None => None,
        };
        Ok(ArrayCreate {
            name: self.name,
            level: self.level,
            drives: self.drives,
            chunk_bytes,
            copies: self.copies,
            group_members: self.group_size,
            integrity: self.integrity,
            settings: self.settings.change(),
            force: self.force,
        })
    }
}

async fn run_replace(replace: Replace, client: &Client, output: Output) -> Answer<()> {
    let Replace { name, member, old, new, force, wait } = replace;
    let path = format!("{}/replace", path_of("arrays", &name));
    let request = ArrayReplace { member, old, new: new.clone(), force };
    let mut array: Array = client.post(&path, &request).await?;
    if wait {
        array = follow(client, &name, Work::rebuild_of(&array)).await?;
    }
    show(output, &array, |array| {
        let index = array.members.iter().find(|its| its.drive.as_ref() == Some(&new));
        let member = or_dash(index.map(|its| its.index));
        let done = if wait { "was rebuilt" } else { "is being rebuilt" };
        format!("member {member} of array {name} {done} on drive {new}")
    })
}

async fn run_grow(grow: Grow, client: &Client, output: Output) -> Answer<()> {
    let Grow { name, add, force, wait } = grow;
    let path = format!("{}/grow", path_of("arrays", &name));
    let moves = !add.is_empty() && !wait;
    let mut grown: ArrayGrown = client.post(&path, &ArrayGrow { add, force }).await?;
    if wait {
        grown.array = follow(client, &name, Work::Restripe).await?;
    }
    show(output, &grown, |grown| {
        let (gained, size) = (Size(grown.gained_bytes), grown.array.capacity_bytes);
        if moves {
            return format!(
                "array {name} is being moved to all its drives, and then gains {gained}"
            );
        }
        format!("array {name} has gained {gained}: {}", or_dash(size.map(Size)))
    })
}

async fn run_rebuild(name: &str, wait: bool, client: &Client, output: Output) -> Answer<()> {
    let path = format!("{}/rebuild", path_of("arrays", name));
    let started: RebuildStarted = client.post(&path, &()).await?;
    if !wait {
        return show(output, &started, |started| {
            let mut members = started.array.members.iter();
            let line = if members.any(|its| its.state == MemberState::Rebuilding) {
                format!("the rebuild of array {name} runs")
            } else {
                format!("array {name} is {}", state_name(started.array.state))
            };
            with_notes(&line, &started.notes)
        });
    }
    let array = follow(client, name, Work::rebuild_of(&started.array)).await?;
    show(output, &array, |array| {
        with_notes(&format!("array {name} is {}", state_name(array.state)), &started.notes)
    })
}

fn show_scan(result: &ScanResult, output: Output) -> Answer<ExitCode> {
    let shown = show(output, result, |result| {
        let lines: Vec<String> = result.started.iter().map(started).collect();
        if lines.is_empty() && result.failed.is_empty() {
            return "no array to start on the attached drives".to_owned();
        }
        with_notes(&lines.join("\n"), &result.notes)
    });
    for failure in &result.failed {
        complain(output, &failure.error, failure.fix.as_deref());
    }
    shown?;
    Ok(if result.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// With what is lost: a start by force may have cost something.
fn started(array: &Array) -> String {
    let mut lines = vec![format!("array {} started: {}", array.name, state_name(array.state))];
    lines.extend(bad_text(&array.bad_blocks));
    lines.join("\n")
}

fn shown_state(array: &Array) -> String {
    let state = state_name(array.state);
    if array.on_demand { format!("{state}, on demand") } else { state.to_owned() }
}

pub fn state_name(state: ArrayState) -> &'static str {
    match state {
        ArrayState::Optimal => "optimal",
        ArrayState::Degraded => "degraded",
        ArrayState::Failed => "failed",
        ArrayState::Stopped => "stopped",
        ArrayState::Unavailable => "unavailable",
        ArrayState::Silent => "silent",
    }
}

/// `RAID 5, 4+1 chunks of 64K`, `RAID 60, 2 groups of 6+2 chunks of 64K`.
fn layout(array: &Array) -> String {
    let (Some(level), Some(data), Some(parity)) =
        (&array.level, array.data_chunks, array.parity_chunks)
    else {
        return "-".to_owned();
    };
    let chunk = Size(array.chunk_bytes.unwrap_or(0).into());
    match (array.copies, parity) {
        (Some(copies), 0) if copies > 1 => {
            format!("RAID {level}, {data}\u{d7}{copies} chunks of {chunk}")
        }
        (_, 0) => format!("RAID {level}, {data} chunks of {chunk}"),
        // The level says it.
        (_, _) if level.contains('+') => format!("RAID {level}, chunks of {chunk}"),
        (_, _) => {
            let groups = array.groups.filter(|groups| *groups > 1);
            let groups = groups.map(|groups| format!("{groups} groups of ")).unwrap_or_default();
            format!("RAID {level}, {groups}{data}+{parity} chunks of {chunk}")
        }
    }
}

/// `42 %, 310.0 MB/s, 3 min 20 s left`.
pub fn progress_text(progress: &Progress) -> String {
    let mut parts = vec![format!("{} %", progress.percent)];
    parts.extend(pace_text(progress));
    parts.join(", ")
}

/// `310.0 MB/s, 3 min 20 s left`; `None`: nothing is known, or it stands still.
pub fn pace_text(progress: &Progress) -> Option<String> {
    let rate = Some(progress.bytes_per_second).filter(|rate| *rate > 0)?;
    let rate = format!("{} MB/s", traffic::megabytes(rate));
    let left = progress.remaining_ms.map(|ms| format!("{} left", duration(ms)));
    Some([Some(rate), left].into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// What goes on in an array: the rebuild before the rest.
pub fn work_text(array: &Array) -> Option<String> {
    let scrub = array.scrub.as_ref().and_then(|scrub| scrub.progress);
    let works = [
        ("rebuild", array.rebuild),
        ("resync", array.resync),
        ("restripe", array.restripe),
        ("scrub", scrub),
    ];
    let mut running = works.iter().filter_map(|(what, progress)| {
        progress.map(|progress| format!("{what} {}", progress_text(&progress)))
    });
    running.next()
}

pub fn arrays_table(arrays: &[Array]) -> String {
    let mut shown =
        table(&["NAME", "STATE", "MAY LOSE>", "LAYOUT", "SIZE>", "FREE>", "VOLUMES>", "WORK"]);
    for array in arrays {
        let running = array.capacity_bytes.is_some();
        shown.add_row([
            array.name.clone(),
            shown_state(array),
            or_dash(array.may_lose),
            layout(array),
            or_dash(array.capacity_bytes.map(Size)),
            or_dash(array.free_bytes.map(Size)),
            or_dash(running.then_some(array.volumes.len())),
            or_dash(work_text(array)),
        ]);
    }
    rows(
        &shown,
        "no arrays; `ashlar array create NAME --level 5 --drives d0,d1,d2` makes one, `ashlar \
         array start --scan` starts those that attached drives have",
    )
}

fn details(array: &Array) -> String {
    let mut lines = vec![
        format!("name        {}", array.name),
        format!("uuid        {}", array.uuid),
        format!("state       {}", shown_state(array)),
    ];
    lines.extend(array.error.as_ref().map(|error| format!("error       {error}")));
    if let Some(capacity) = array.capacity_bytes {
        let free = or_dash(array.free_bytes.map(Size));
        lines.push(format!("layout      {}", layout(array)));
        lines.push(format!("size        {} ({free} free)", Size(capacity)));
        lines.extend(array.may_lose.map(may_lose_line));
        lines.push(format!("volumes     {}", or_dash(listed(&array.volumes))));
        lines.extend(settings_lines(array));
        let checked = array.integrity.filter(|integrity| *integrity);
        lines.extend(checked.map(|_| "integrity   a checksum of every block".to_owned()));
        lines.push(format!("cpu         {}", or_dash(array.cpu)));
        lines.push(format!("generation  {}", or_dash(array.generation)));
        let (written, all) = (or_dash(array.written_regions), or_dash(array.regions));
        lines.push(format!("written     {written} of {all} regions"));
        lines.push(format!("dirty       {} regions", or_dash(array.dirty_regions)));
        lines.extend(array.journal.as_ref().map(journal_line));
        lines.extend(array.replayed.as_ref().map(replay_line));
    }
    let works =
        [("rebuild", array.rebuild), ("resync", array.resync), ("restripe", array.restripe)];
    for (what, progress) in works {
        lines.extend(progress.map(|progress| format!("{what:<12}{}", progress_text(&progress))));
    }
    lines.extend(bad_text(&array.bad_blocks).map(|bad| format!("bad         {bad}")));
    // It may have been taken up again.
    let stopped = array.rebuild_error.as_ref().filter(|_| array.rebuild.is_none());
    lines.extend(stopped.map(|why| format!("rebuild     stopped: {why}")));
    let waits = array.restripe_error.as_ref();
    lines.extend(waits.map(|why| format!("restripe    waits: {why}")));
    lines.extend(scrub::lines(array));
    if let Some(its) = &array.counters {
        lines.push(format!("reads       {} ({})", its.reads, Size(its.read_bytes)));
        lines.push(format!("writes      {} ({})", its.writes, Size(its.write_bytes)));
        lines.push(format!("flushes     {}", its.flushes));
        lines.push(format!("rescued     {} read anew from others", its.reconstructed));
        let (hedged, won) = (its.hedged, its.hedges_won);
        lines.push(format!("hedged      {hedged} reads, others were first for {won}"));
        lines.push(format!("repaired    {} blocks", its.repaired));
        lines.extend(stored_line(its));
    }
    lines.extend(array.traffic.iter().flat_map(|its| traffic::lines(its, 12)));
    lines.extend(array.members.iter().filter_map(slow_line));
    lines.extend(array.members.iter().filter_map(takeover_line));
    if !array.members.is_empty() {
        lines.push(String::new());
        lines.push(members_table(&array.members));
    }
    lines.join("\n")
}

/// `3 ranges, 24 KiB, lost until they are written again: v0 at 4096, v0 at 81920, ...`
fn bad_text(bad: &[BadBlocks]) -> Option<String> {
    let bytes = bad.iter().map(|range| range.bytes).sum();
    let place = |range: &BadBlocks| match (&range.volume, range.volume_offset) {
        (Some(volume), Some(offset)) => format!("{volume} at {offset}"),
        (_, _) => format!("no volume, at {} of the array", range.offset),
    };
    let mut places: Vec<String> = bad.iter().take(BAD_PLACES_SHOWN).map(place).collect();
    if bad.len() > BAD_PLACES_SHOWN {
        places.push("...".to_owned());
    }
    let (count, places) = (bad.len(), listed(&places)?);
    let size = Size(bytes);
    let ranges = if count == 1 { "range" } else { "ranges" };
    Some(format!("{count} {ranges}, {size}, lost until they are written again: {places}"))
}

/// What redundancy there is just now.
fn may_lose_line(count: u8) -> String {
    let count = match count {
        0 => "no drive".to_owned(),
        1 => "1 more drive, whichever it is".to_owned(),
        count => format!("{count} more drives, whichever they are"),
    };
    format!("may lose    {count}")
}

fn settings_lines(array: &Array) -> Vec<String> {
    array.settings.as_ref().map(settings::lines).unwrap_or_default()
}

fn journal_line(journal: &JournalFill) -> String {
    let (used, pending) = (Size(journal.used_bytes), Size(journal.pending_bytes));
    let (bytes, percent) = (Size(journal.bytes), journal.used_percent);
    let (memory, replayed) =
        (Size(journal.pending_memory_bytes), Size(journal.crash_replayed_bytes));
    let (most, read) = (Size(journal.pending_memory_bytes_max), Size(journal.crash_read_bytes));
    format!(
        "journal     {used} of {bytes} used ({percent} %), {pending} not in place yet ({memory} of \
         memory, {most} at most)\ncrash now   {read} of journals would be read, {replayed} at most \
         put in place"
    )
}

/// `640M of journals read and 310M put in place in 2.3 s, at the last start`
fn replay_line(its: &JournalReplay) -> String {
    if its.read_bytes == 0 {
        return "recovery    nothing to do at the last start".to_owned();
    }
    let (read, bytes) = (Size(its.read_bytes), Size(its.bytes));
    let took = time(its.took_ms.saturating_mul(1_000_000));
    format!(
        "recovery    {read} of journals read, {bytes} put in place in {took}, at the last start"
    )
}

/// `98 % of writes by the journal; in place 60 % read-modify-write, 40 % whole stripes`
fn stored_line(its: &ArrayCounters) -> Option<String> {
    let updates = &its.updates;
    let kinds = [
        (updates.read_modify_write, "read-modify-write"),
        (updates.reconstruct_write, "reconstruct-write"),
        (updates.whole_stripe, "whole stripes"),
        (updates.decode, "worked out from the others"),
        (updates.plain, "without parity"),
    ];
    let all = kinds.iter().map(|(count, _)| count).sum();
    let some = kinds.iter().filter(|(count, _)| *count > 0);
    let some: Vec<String> =
        some.map(|(count, kind)| format!("{} % {kind}", percent(*count, all))).collect();
    let in_place = listed(&some).map(|kinds| format!("in place {kinds}"));
    let journaled = (its.journaled > 0)
        .then(|| format!("{} % of writes by the journal", percent(its.journaled, its.writes)));
    let parts: Vec<String> = journaled.into_iter().chain(in_place).collect();
    (!parts.is_empty()).then(|| format!("stored      {}", parts.join("; ")))
}

fn slow_line(member: &Member) -> Option<String> {
    let (slowness, drive) = (member.slowness?, or_dash(member.drive.as_ref()));
    Some(format!("member {:<5}drive {drive} is slow: {slowness}", member.index))
}

fn takeover_line(member: &Member) -> Option<String> {
    let takeover = member.takeover.as_ref()?;
    let (index, spare) = (member.index, &takeover.spare);
    let left = duration(takeover.remaining_ms);
    Some(format!("member {index:<5}spare {spare} takes over in {left}"))
}

fn listed(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(", "))
}

fn members_table(members: &[Member]) -> String {
    let mut shown = table(&["MEMBER>", "DRIVE", "STATE", "HEALTH", "ERRORS", "CURRENT>", "UUID"]);
    for member in members {
        let drive = match (&member.drive, &member.last_drive) {
            (Some(drive), _) => drive.clone(),
            (None, Some(last)) => format!("- (was {last})"),
            (None, None) => "-".to_owned(),
        };
        shown.add_row([
            member.index.to_string(),
            drive,
            member_state(member).to_owned(),
            health(member),
            or_dash(errors(member)),
            or_dash(member.present.then(|| format!("{} %", member.rebuilt_percent))),
            member.drive_uuid.to_string(),
        ]);
    }
    rows(&shown, "")
}

/// `healthy`, `suspect, slow`.
fn health(member: &Member) -> String {
    let slow = if member.slow { ", slow" } else { "" };
    format!("{}{slow}", member.health.map_or("missing", health_name))
}

/// `3 read, 1 silent`, over all starts, and stripes that the last scrub found wrong; `None`: there
/// were none.
fn errors(member: &Member) -> Option<String> {
    let wrong = Some(member.wrong_stripes).filter(|count| *count > 0);
    let met = member.history.as_ref().and_then(DriveHistory::errors);
    let wrong = wrong.map(|its| format!("{its} wrong"));
    listed(&met.into_iter().chain(wrong).collect::<Vec<_>>())
}

fn member_state(member: &Member) -> &'static str {
    match (member.present, member.state) {
        (false, _) => "absent",
        (true, MemberState::Trusted) => "trusted",
        (true, MemberState::Stale) => "stale",
        (true, MemberState::Rebuilding) => "rebuilding",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_says_what_is_known() {
        let mut its = Progress {
            stripes_done: 42,
            stripes_total: 100,
            percent: 42,
            elapsed_ms: 1,
            bytes_per_second: 0,
            remaining_ms: None,
        };
        assert_eq!(progress_text(&its), "42 %");
        (its.bytes_per_second, its.remaining_ms) = (310_050_000, Some(200_000));
        assert_eq!(progress_text(&its), "42 %, 310.0 MB/s, 3 min 20 s left");
    }
}
