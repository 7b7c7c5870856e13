//! The page: everything in one file, for light and dark, narrow and wide, with every figure as a table too.

use super::curves::{COLOURS, Plot};
use super::figures::{Figures, HitRates, INSERTS, LAG};
use super::heat;
use crate::cli::output::percent;
use crate::cli::page;
use crate::cli::size::show;
use crate::profile::RecordedProfile;
use crate::units::Bytes;
use anyhow::Result;
use maud::{Markup, PreEscaped, html};

const GIB: f64 = (1u64 << 30) as f64;

/// The whole page.
pub fn page(figures: &Figures, profile: &RecordedProfile) -> Result<String> {
    let title = format!("moe-hot report: {}", figures.profile.display());
    let content = html! {
        (facts(figures))
        (heat_map(figures, profile))
        div.two {
            (coverage(figures)?)
            (hit_rates(figures)?)
        }
    };
    Ok(page::page(&title, "", &content))
}

fn facts(figures: &Figures) -> Markup {
    html! {
        dl {
            dt { "profile" } dd { (figures.profile.display()) }
            @if let Some(trace) = &figures.trace { dt { "trace" } dd { (trace.display()) } }
            dt { "model" } dd { (figures.model.as_deref().unwrap_or("the profile does not say")) }
            dt { "layers" } dd { (figures.layers.len()) }
            dt { "experts per layer" } dd { (figures.n_expert) }
            dt { "requests counted" } dd { (figures.requests) }
        }
    }
}

fn heat_map(figures: &Figures, profile: &RecordedProfile) -> Markup {
    let last = figures.n_expert.saturating_sub(1);
    let layer = |layer: Option<&super::figures::LayerFigures>| layer.map_or(0, |layer| layer.layer);
    let (top, bottom) = (layer(figures.layers.first()), layer(figures.layers.last()));
    html! {
        figure {
            h2 { "How often each expert was used" }
            div.map role="img" aria-label="Heat map of layers and experts; the table below has its numbers" {
                div.rows aria-hidden="true" { span { (top) } span { "layer" } span { (bottom) } }
                (heat::map(profile, figures.n_expert))
                div.columns aria-hidden="true" { span { "0" } span { "expert" } span { (last) } }
            }
            figcaption {
                "Times as often as if all experts of a layer were used alike:"
                ul.legend {
                    @for shade in 0..heat::SHADES {
                        li { span class={"swatch s" (shade)} {} (heat::meaning(shade)) }
                    }
                }
            }
            details {
                summary { "As a table" }
                div.wide { table {
                    thead { tr {
                        th { "layer" } th { "experts" } th { "requests" } th { "Gini" }
                        @if let Some(first) = figures.layers.first() {
                            @for part in &first.skew.coverage { th { "best " (percent(part.experts)) } }
                        }
                        th { "most used" }
                    } }
                    tbody { @for layer in &figures.layers { tr {
                        td { (layer.layer) } td { (layer.n_expert) } td { (layer.requests) }
                        td { (format!("{:.2}", layer.skew.gini)) }
                        @for part in &layer.skew.coverage { td { (percent(part.requests)) } }
                        td { (layer.most_used.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")) }
                    } } }
                } }
                p { "Gini: 0 if all experts are used alike, towards 1 if few have all requests. best N %: share of requests that so \
                     many of the experts have." }
            }
        }
    }
}

fn coverage(figures: &Figures) -> Result<Markup> {
    type Share = fn(&super::figures::CoveragePoint) -> f64;
    let shares: [(&str, Share); 3] = [
        ("the layer with most", |p| p.most),
        ("mean of all layers", |p| p.mean),
        ("the layer with least", |p| p.least),
    ];
    let line = |share: Share| figures.coverage.iter().map(|point| (point.experts, share(point))).collect();
    let plot = Plot {
        x_label: "share of the experts, most used first",
        x_end: 1.0,
        x_format: &|x| format!("{:.0} %", 100.0 * x),
        lines: shares.iter().map(|(_, share)| line(*share)).collect(),
    };
    Ok(html! {
        figure {
            h2 { "Coverage" }
            div role="img" aria-label="Share of requests that the most used experts have; the table below has its numbers" {
                (PreEscaped(plot.svg()?))
            }
            figcaption { "Share of all requests that the most used experts have." (legend(shares.iter().map(|(name, _)| *name))) }
            details {
                summary { "As a table" }
                div.wide { table {
                    thead { tr { th { "experts" } @for (name, _) in &shares { th { (name) } } } }
                    tbody { @for point in figures.coverage.iter().step_by(2) { tr {
                        td { (percent(point.experts)) }
                        @for (_, share) in &shares { td { (percent(share(point))) } }
                    } } }
                } }
            }
        }
    })
}

fn hit_rates(figures: &Figures) -> Result<Markup> {
    let x = |point: &super::figures::HitRate| match point.bytes {
        Some(bytes) if figures.has_bytes => bytes as f64 / GIB,
        _ => f64::from(point.slots),
    };
    let line = |rates: &HitRates| rates.points.iter().map(|point| (x(point), point.hit_rate)).collect();
    let x_end = figures.hit_rates.iter().flat_map(|rates| &rates.points).map(x).fold(0.0, f64::max);
    let digits = if figures.has_bytes && x_end < 10.0 { if x_end < 0.1 { 3 } else { 1 } } else { 0 };
    let plot = Plot {
        x_label: if figures.has_bytes { "GiB of experts on the GPU" } else { "slots per layer" },
        x_end: if x_end > 0.0 { x_end } else { 1.0 },
        x_format: &|x| format!("{x:.digits$}"),
        lines: figures.hit_rates.iter().map(line).collect(),
    };
    let points = figures.hit_rates.first().map(|rates| rates.points.as_slice()).unwrap_or_default();
    Ok(html! {
        figure {
            h2 { "Hit rate against budget" }
            div role="img" aria-label="Hit rate by GPU memory; the table below has its numbers" { (PreEscaped(plot.svg()?)) }
            figcaption {
                @if figures.trace.is_some() {
                    "Replay of the trace's decoded tokens; all begin with this profile. A copy serves " (LAG) " tokens after it was started, "
                    (INSERTS) " starts per layer and token."
                } @else {
                    "What the profile expects of a fixed set. A cache that learns mostly does better; a trace (--trace) shows by how much."
                }
                (legend(figures.hit_rates.iter().map(|rates| rates.name)))
            }
            details {
                summary { "As a table" }
                div.wide { table {
                    thead { tr {
                        th { "slots per layer" } @if figures.has_bytes { th { "memory" } }
                        @for rates in &figures.hit_rates { th { (rates.name) } }
                    } }
                    tbody { @for (place, point) in points.iter().enumerate() { tr {
                        td { (point.slots) }
                        @if let (true, Some(bytes)) = (figures.has_bytes, point.bytes) { td { (show(Bytes(bytes))) } }
                        @for rates in &figures.hit_rates { td { (percent(rates.points[place].hit_rate)) } }
                    } } }
                } }
            }
        }
    })
}

fn legend<'a>(names: impl Iterator<Item = &'a str>) -> Markup {
    html! {
        ul.legend {
            @for (name, colour) in names.zip(COLOURS.iter().cycle()) {
                li { span.swatch style=(format!("background:rgb({},{},{})", colour.0, colour.1, colour.2)) {} (name) }
            }
        }
    }
}
