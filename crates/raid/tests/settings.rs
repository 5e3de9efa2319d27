//! Goal: what was set holds at once and after a restart; what cannot be set changes nothing.
//! Method: arrays on RAM drives, settings of both kinds, restarts.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_raid::error::ChangeError;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::AssembleOptions;

use crate::pair::{Pair, run};

#[test]
fn settings_outlive_the_array() {
    run(|reactor| async move {
        for sector in [512, 4096] {
            let mut pair = Pair::new(&reactor, Level::Raid5, 3, sector).await;
            let change = SettingsChange { rebuild_percent: Some(70), ..SettingsChange::default() };
            pair.array.set_settings(change).await.unwrap();
            let atomic = 252 << 10;
            let change = SettingsChange { atomic_bytes: Some(atomic), ..SettingsChange::default() };
            pair.array.set_settings(change).await.unwrap();
            let wrong = SettingsChange {
                rebuild_percent: Some(20),
                hedge_percent: Some(101),
                ..SettingsChange::default()
            };
            let refused = pair.array.set_settings(wrong).await;
            assert!(matches!(refused, Err(ChangeError::Spec(why)) if why.contains("0 to 100")));
            let set = pair.array.settings();
            assert_eq!((set.rebuild_percent(), set.atomic_bytes(sector)), (70, atomic));
            // The longest atomic write, wherever it begins, is one batch: else the engine panics.
            for at in [0, 512, 3584, 4096] {
                pair.put(at, &vec![at.to_le_bytes()[1]; atomic as usize]).await;
            }
            pair.check().await;
            // Also while a member is away.
            pair.array.pull_member(MemberIndex(1)).unwrap();
            let change = SettingsChange { spare_delay_s: Some(0), ..SettingsChange::default() };
            pair.array.set_settings(change).await.unwrap();
            let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
            pair.restart(options).await;
            let again = pair.array.settings();
            assert_eq!((again.rebuild_percent(), again.atomic_bytes(sector)), (70, atomic));
            assert_eq!(again.spare_delay_s(), 0);
            pair.array.stop().await.unwrap();
        }
    });
}
