//! The heat map: one row per layer, one column per expert, darker or brighter by how often it was used.
//!
//! One path per shade instead of a rectangle per cell, so that the page stays small and its style sheet colours it.

use crate::profile::RecordedProfile;
use maud::{Markup, PreEscaped, html};
use std::fmt::Write;

/// Uses, in multiples of what an expert would have if all were used alike, from which on a shade is taken.
pub const BOUNDS: [f64; 5] = [0.5, 1.0, 2.0, 4.0, 8.0];
/// Shades: never used, up to each bound, above the last.
pub const SHADES: usize = BOUNDS.len() + 2;

/// The shade of an expert with so many times the even share.
pub fn shade(times: f64) -> usize {
    if times == 0.0 { 0 } else { 1 + BOUNDS.iter().filter(|&&bound| times >= bound).count() }
}

/// What a shade stands for.
pub fn meaning(shade: usize) -> String {
    match shade {
        0 => "never used".into(),
        1 => format!("below {}", BOUNDS[0]),
        shade if shade == SHADES - 1 => format!("{} and more", BOUNDS[SHADES - 3]),
        shade => format!("{} to {}", BOUNDS[shade - 2], BOUNDS[shade - 1]),
    }
}

/// The map. Rows are the profile's layers in order; columns `0..n_expert`.
pub fn map(profile: &RecordedProfile, n_expert: u32) -> Markup {
    let mut paths = vec![String::new(); SHADES];
    for (row, layer) in profile.layers.values().enumerate() {
        let of_layer = crate::cli::formats::n_expert(profile, layer);
        let total: f64 = layer.requests.iter().map(|&(_, count)| count as f64).sum();
        let mut shades = vec![0; of_layer as usize];
        for &(expert, count) in &layer.requests {
            shades[expert as usize] = shade(count as f64 * f64::from(of_layer) / total);
        }
        let mut start = 0;
        for run in shades.chunk_by(|a, b| a == b) {
            // Writing to a String cannot fail.
            let _ = write!(paths[run[0]], "M{start} {row}h{}v1h-{}z", run.len(), run.len());
            start += run.len();
        }
    }
    let view = format!("0 0 {n_expert} {}", profile.layers.len());
    html! {
        svg.heat viewBox=(view) preserveAspectRatio="none" aria-hidden="true" shape-rendering="crispEdges"
            style={"height:" (profile.layers.len().clamp(12, 80) * 9) "px"} {
            @for (shade, path) in paths.iter().enumerate() {
                (PreEscaped(format!("<path class=\"s{shade}\" d=\"{path}\"/>")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::formats::profile_of;
    use std::collections::BTreeMap;

    #[test]
    fn shades_follow_the_even_share() {
        assert_eq!([0.0, 0.1, 0.5, 1.0, 7.9, 8.0, 1e9].map(shade), [0, 1, 2, 3, 5, 6, 6]);
        assert_eq!((meaning(1), meaning(2), meaning(6)), ("below 0.5".into(), "0.5 to 1".into(), "8 and more".into()));
    }

    #[test]
    fn every_cell_is_drawn_once() {
        let counts = BTreeMap::from([(0, BTreeMap::from([(1, 6), (2, 6)])), (3, BTreeMap::from([(0, 1)]))]);
        let map = map(&profile_of(counts, Some(4), None).unwrap(), 4).into_string();
        assert!(map.contains("M0 0h1v1h-1zM3 0h1v1h-1zM1 1h3v1h-3z"), "{map}");
        assert!(map.contains("class=\"s4\" d=\"M1 0h2v1h-2z") || map.contains("d=\"M1 0h2v1h-2z"), "{map}");
    }
}
