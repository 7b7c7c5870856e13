//! Scores as ranks: what a profile keeps of them, and back.
//!
//! Raw counts of one run say too much: as a seed they cost hits (docs/policy.md, Ranks and seed). A rank says which expert was better
//! and not by how much, and fits into 16 bits.

/// Each expert's place from the bottom, `[n_expert]`: 0 for a score of zero or less, else 1 and up; equal scores share a place.
pub fn ranks(scores: &[f32]) -> Vec<u16> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|&expert| scores[expert] > 0.0).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    let mut ranks = vec![0; scores.len()];
    let mut place = 0u16;
    let mut last = 0.0;
    for expert in order {
        if scores[expert] > last {
            place = place.saturating_add(1);
            last = scores[expert];
        }
        ranks[expert] = place;
    }
    ranks
}

/// Uses per call to expect of experts with these ranks, 0 to 1, `[n_expert]`, when each call uses `n_used` of them.
///
/// Proportional to the square of the rank: measured use falls faster than linearly from the best to the worst.
pub fn worth_of_ranks(ranks: &[u16], n_used: u16) -> Vec<f32> {
    let square = |&rank: &u16| f32::from(rank) * f32::from(rank);
    let sum: f32 = ranks.iter().map(square).sum();
    let scale = if sum > 0.0 { f32::from(n_used) / sum } else { 0.0 };
    ranks.iter().map(|rank| (square(rank) * scale).min(1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_best_has_the_highest_rank_and_the_unused_none() {
        assert_eq!(ranks(&[0.5, 0.0, 7.0, 0.5, -1.0, f32::NAN]), [1, 0, 2, 1, 0, 0]);
    }

    #[test]
    fn worth_adds_up_to_the_experts_used() {
        let worth = worth_of_ranks(&[1, 2, 3, 0, 4, 5, 6, 7], 2);
        assert!((worth.iter().sum::<f32>() - 2.0).abs() < 1e-5 && worth[3] == 0.0);
        assert_eq!(worth_of_ranks(&[0, 0], 2), [0.0, 0.0]);
    }

    proptest! {
        #[test]
        fn ranks_keep_the_order_and_nothing_else(scores in prop::collection::vec(0.0f32..1e6, 0..300)) {
            let first = ranks(&scores);
            let worth = worth_of_ranks(&first, 1);
            for (a, b) in (0..scores.len()).zip(1..scores.len()) {
                prop_assert_eq!(scores[a].total_cmp(&scores[b]), first[a].cmp(&first[b]));
            }
            prop_assert_eq!(ranks(&worth), first);
        }
    }
}
