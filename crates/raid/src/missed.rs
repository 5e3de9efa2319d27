//! What a member lacks that was away and is back: so much is rebuilt, and no more.

use ashlar_format::units::{RegionIndex, StripeIndex, to_usize};

/// A set of regions, in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    region_stripes: u64,
    inside: Vec<bool>,
}

impl Behind {
    pub(crate) fn new(
        regions: u64,
        region_stripes: u32,
        inside: impl Iterator<Item = RegionIndex>,
    ) -> Behind {
        let mut bits = vec![false; to_usize(regions)];
        inside.for_each(|region| bits[to_usize(region.0)] = true);
        Behind { region_stripes: region_stripes.into(), inside: bits }
    }

    /// Whether the stripe is in one of the regions.
    pub fn contains(&self, stripe: StripeIndex) -> bool {
        self.inside[to_usize(stripe.0 / self.region_stripes)]
    }
}
