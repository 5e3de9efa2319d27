//! `ashlar array scrub`, and what a scrub found as text.

use std::collections::BTreeSet;
use std::process::ExitCode;

use ashlar_raid::status::SCRUB_PLACES_MAX as PLACES_MAX;

use crate::api::array::{Array, ArrayScrub, Member, Scrub, ScrubFlaw, ScrubPlace, ScrubState};
use crate::cli::array::progress_text;
use crate::cli::follow::{Work, follow};
use crate::cli::output::{Output, ago, or_dash, show};
use crate::client::{Client, path_of};
use crate::refusal::Answer;

pub async fn run(
    name: &str,
    request: ArrayScrub,
    wait: bool,
    client: &Client,
    output: Output,
) -> Answer<ExitCode> {
    let path = format!("{}/scrub", path_of("arrays", name));
    // One that runs already, and does the same, is waited for.
    let array = match wait && !request.stop {
        true => running_alike(name, &request, client).await?,
        false => None,
    };
    let array = match array {
        Some(array) => array,
        None => client.post(&path, &request).await?,
    };
    if !wait {
        let what = if request.stop { "ends" } else { "runs" };
        show(output, &array, |_| format!("the scrub of array {name} {what}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let array = follow(client, name, Work::Scrub).await?;
    show(output, &array, |array| {
        let said = or_dash(array.scrub.as_ref().map(found_text));
        let mut lines = vec![format!("scrub of array {name} {said}")];
        lines.extend(place_lines(array));
        lines.join("\n")
    })?;
    let is_clean = array.scrub.as_ref().is_some_and(is_clean);
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn running_alike(name: &str, request: &ArrayScrub, client: &Client) -> Answer<Option<Array>> {
    let array: Array = client.get(&path_of("arrays", name)).await?;
    let is_alike = |its: &Scrub| its.state == ScrubState::Running && its.repair == request.repair;
    let runs = array.scrub.as_ref().is_some_and(is_alike);
    Ok(runs.then_some(array))
}

/// It came to its end, and all that was wrong is mended.
fn is_clean(scrub: &Scrub) -> bool {
    let readable = scrub.unreadable_stripes == 0 && scrub.bad_stripes == 0;
    let readable = readable && scrub.unknown_below == 0;
    readable && scrub.is_mended() && scrub.state == ScrubState::Finished
}

/// For `array show`: the scrub and its places.
pub fn lines(array: &Array) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(array.scrub.as_ref().map(|scrub| format!("scrub       {}", found_text(scrub))));
    lines.extend(place_lines(array));
    lines
}

fn found_text(scrub: &Scrub) -> String {
    let found = counts_text(scrub);
    let known = match scrub.unknown_below {
        0 => String::new(),
        stripe => format!(" from stripe {stripe} on; what was before it is not known"),
    };
    let found = format!("{found}{known}");
    let ago = scrub.ended_s.map(|its| format!(" {}", ago(its))).unwrap_or_default();
    match (scrub.state, &scrub.progress) {
        (ScrubState::Never, _) => "never".to_owned(),
        (ScrubState::Running, Some(progress)) => format!("{}; {found}", progress_text(progress)),
        (ScrubState::Running, None) => format!("runs; {found}"),
        (ScrubState::Stopped, _) => format!("stopped before its end{ago}; {found}"),
        (ScrubState::Finished, _) => format!("done{ago}: {found}"),
    }
}

/// `3 stripes did not agree; 2 stripes repaired; of 1 it cannot be told what is wrong`.
fn counts_text(scrub: &Scrub) -> String {
    let (mismatched, damaged) = (scrub.mismatched_stripes, scrub.damaged_stripes);
    let mut parts = Vec::new();
    if mismatched > 0 {
        parts.push(format!("{mismatched} stripes did not agree"));
    }
    if damaged > 0 {
        parts.push(format!(
            "{damaged} stripes had blocks that could not be read or did not fit their checksums"
        ));
    }
    if mismatched + damaged > 0 {
        parts.push(format!("{} stripes repaired", scrub.repaired_stripes));
    }
    if scrub.undecided_stripes > 0 {
        let undecided = scrub.undecided_stripes;
        parts.push(format!("of {undecided} it cannot be told what is wrong"));
    }
    if scrub.unreadable_stripes > 0 {
        parts.push(format!("{} stripes could not be checked", scrub.unreadable_stripes));
    }
    if scrub.bad_stripes > 0 {
        parts.push(format!("{} stripes have lost blocks", scrub.bad_stripes));
    }
    match scrub.state {
        _ if !parts.is_empty() => parts.join("; "),
        ScrubState::Finished => "all is well".to_owned(),
        ScrubState::Never | ScrubState::Running | ScrubState::Stopped => {
            "all was well so far".to_owned()
        }
    }
}

/// Where, and what can be done about what is not mended.
fn place_lines(array: &Array) -> Vec<String> {
    let Some(scrub) = &array.scrub else { return Vec::new() };
    let places = scrub.places.iter().map(|place| place_line(place, &array.members));
    let advice = advice(scrub, &array.name);
    let more = more_text(scrub).into_iter().chain(advice);
    places.chain(more.map(|line| format!("            {line}"))).collect()
}

/// That not all stripes are listed in which something was wrong.
fn more_text(scrub: &Scrub) -> Option<String> {
    let listed: BTreeSet<u64> = scrub.places.iter().map(|place| place.stripe).collect();
    let known = scrub.mismatched_stripes + scrub.damaged_stripes;
    let is_full = scrub.places.len() >= PLACES_MAX && known > listed.len() as u64;
    is_full.then(|| format!("and in other stripes: no more than {PLACES_MAX} places are kept"))
}

/// `at 1310720 +512 (stripe 5, v at 262144): member 2, drive d2, did not fit its checksum; mended`.
fn place_line(place: &ScrubPlace, members: &[Member]) -> String {
    let ScrubPlace { stripe, offset, len, member, what, repaired, .. } = place;
    let volume = match (&place.volume, place.volume_offset) {
        (Some(volume), Some(offset)) => format!(", {volume} at {offset}"),
        (_, _) => String::new(),
    };
    let who = match member {
        Some(index) => {
            let drive = members.iter().find(|its| its.index == *index);
            format!("member {index}, drive {}", or_dash(drive.and_then(|its| its.drive.clone())))
        }
        None => "it cannot be told which member".to_owned(),
    };
    let what = match what {
        ScrubFlaw::Mismatch => "",
        ScrubFlaw::Block => ", did not fit its checksum",
        ScrubFlaw::Checksum => ", had lost the checksum",
        ScrubFlaw::Unreadable => ", could not be read",
    };
    let mended = match (repaired, member) {
        (true, Some(_)) => "mended",
        (true, None) => "made to agree",
        (false, _) => "not mended",
    };
    format!("            at {offset} +{len} (stripe {stripe}{volume}): {who}{what}; {mended}")
}

fn advice(scrub: &Scrub, name: &str) -> Vec<String> {
    let is_left = scrub.has_places_left();
    let mut lines = Vec::new();
    if scrub.unreadable_stripes > 0 {
        let advice = match is_left {
            true => {
                "what is not mended cannot be worked out from the other drives: it is an error \
                 until it is written again, so restore those ranges from a copy that you have"
            }
            false => {
                "stripes cannot be checked where members are missing or not in sync: scrub again \
                      when all are here"
            }
        };
        lines.push(advice.to_owned());
    }
    if scrub.undecided_stripes > 0 && !scrub.repair {
        lines.push(format!(
            "nothing tells there which drive is wrong (arrays made with --integrity can): look at \
             what stands there, restore it from a copy if it is wrong, and then have parity or \
             copies made to agree, by `ashlar array scrub {name} --repair`"
        ));
    }
    if is_left {
        lines.push(format!(
            "the drives that are named may have more of it: replace them (`ashlar array replace \
             {name} --old DRIVE --new DRIVE`), and scrub again"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_mended_is_told_and_no_failure() {
        assert_eq!(found_text(&Scrub::clean()), "done: all is well");
        assert!(is_clean(&Scrub::clean()));
        let stopped = Scrub { state: ScrubState::Stopped, ..Scrub::clean() };
        assert_eq!(found_text(&stopped), "stopped before its end; all was well so far");
        let mended = Scrub { damaged_stripes: 3, repaired_stripes: 3, ..Scrub::clean() };
        let said = found_text(&mended);
        assert!(said.contains("3 stripes had blocks") && said.contains("3 stripes repaired"));
        assert!(is_clean(&mended));
        let both = Scrub { mismatched_stripes: 1, ..mended };
        assert!(!is_clean(&both) && found_text(&both).contains("1 stripes did not agree"));
        let bad = Scrub { bad_stripes: 2, ..Scrub::clean() };
        assert!(!is_clean(&bad) && found_text(&bad).contains("2 stripes have lost blocks"));
    }

    #[test]
    fn what_is_lost_is_told_with_what_can_be_done() {
        let place = ScrubPlace {
            stripe: 5,
            offset: 1_310_720,
            len: 4096,
            volume: Some("v".into()),
            volume_offset: Some(262_144),
            member: Some(2),
            what: ScrubFlaw::Block,
            repaired: false,
        };
        let said = place_line(&place, &[]);
        assert!(said.contains("at 1310720 +4096 (stripe 5, v at 262144): member 2"), "{said}");
        assert!(said.ends_with("did not fit its checksum; not mended"), "{said}");
        let lost = Scrub { unreadable_stripes: 1, places: vec![place], ..Scrub::clean() };
        let said = advice(&lost, "a").join("\n");
        assert!(said.contains("restore those ranges") && said.contains("array replace a"));
        let away = Scrub { places: Vec::new(), ..lost.clone() };
        assert!(advice(&away, "a").join("").contains("when all are here"));
        let place = |stripe| ScrubPlace { stripe, ..lost.places[0].clone() };
        let many = Scrub {
            places: (0..PLACES_MAX as u64).map(place).collect(),
            damaged_stripes: PLACES_MAX as u64,
            ..Scrub::clean()
        };
        assert_eq!(more_text(&many), None);
        let more = Scrub { damaged_stripes: many.damaged_stripes + 1, ..many };
        assert!(more_text(&more).is_some_and(|said| said.contains("16 places")));
        assert_eq!(advice(&Scrub::clean(), "a"), Vec::<String>::new());
        let undecided = Scrub { undecided_stripes: 1, ..Scrub::clean() };
        assert!(advice(&undecided, "a").join("").contains("array scrub a --repair"));
        let agreeing = Scrub { repair: true, ..undecided };
        assert_eq!(advice(&agreeing, "a"), Vec::<String>::new());
    }
}
