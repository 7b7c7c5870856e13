//! The page: everything in one file, for light and dark, narrow and wide, with every figure as a table too.

use super::bars::{Bar, OURS, STOCK, svg};
use super::store::Results;
use super::summary::{Measure, Summary};
use super::table::{LAYERS, arm_rows, facts, layer_rows, measure_rows, notes, title, tuning_rows};
use crate::cli::page;
use anyhow::Result;
use maud::{Markup, PreEscaped, html};
use plotters::style::RGBColor;

/// What other pages have not.
const MORE_STYLE: &str = "td:first-child, th:first-child { text-align: left; } code { overflow-wrap: anywhere; }";

/// The whole page.
pub fn page(results: &Results, summary: &Summary) -> Result<String> {
    let name = results.settings.model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let heading = format!("moe-hot compare: {name}");
    let of = |workload: &str| -> Result<Vec<Markup>> {
        summary.measures.iter().filter(|measure| measure.workload == workload).map(figure).collect()
    };
    let content = html! {
        dl { @for (name, value) in facts(results, summary) { dt { (name) } dd { (value) } } }
        figure {
            h2 { "Memory, hits, answers" }
            (table(&arm_rows(summary)))
            ul { @for note in notes(results, summary) { li { (note.replace("**", "")) } } }
        }
        h2 { "Prompts through llama-server" }
        div.two { @for one in of("server")? { (one) } }
        h2 { "llama-bench" }
        div.two { @for one in of("llama-bench")? { (one) } }
        @if let Some(rows) = layer_rows(summary) { figure {
            h2 { (LAYERS) }
            (table(&rows))
        } }
        figure {
            h2 { "How stock was tuned" }
            (table(&tuning_rows(results)))
        }
        (commands(results))
    };
    Ok(page::page(&heading, MORE_STYLE, &content))
}

fn figure(measure: &Measure) -> Result<Markup> {
    let bar = |figure: &super::summary::Figure| Bar {
        is_ours: figure.arm.is_ours(),
        values: figure.values.iter().copied().flatten().collect(),
        median: figure.spread.as_ref().map(|spread| spread.median),
    };
    let bars: Vec<_> = measure.figures.iter().map(bar).collect();
    let mut rows = measure_rows(measure);
    for (number, row) in rows.iter_mut().enumerate().skip(1) {
        row[0] = format!("{number}. {}", row[0]);
    }
    let better = if measure.is_time { "less is better" } else { "more is better" };
    let swatch = |colour: RGBColor| format!("background:rgb({},{},{})", colour.0, colour.1, colour.2);
    Ok(html! {
        figure {
            h2 { (title(measure)) }
            div role="img" aria-label={ (title(measure)) "; the table below has its numbers" } {
                (PreEscaped(svg(&bars, &format!("{}, {better}", measure.unit))?))
            }
            figcaption {
                "Bars: median; rings: pairs."
                ul.legend {
                    li { span.swatch style=(swatch(STOCK)) {} "llama.cpp" }
                    li { span.swatch style=(swatch(OURS)) {} "moe-hot" }
                }
            }
            (table(&rows))
        }
    })
}

fn table(rows: &[Vec<String>]) -> Markup {
    let (header, body) = rows.split_at(rows.len().min(1));
    html! {
        div.wide { table {
            thead { @for row in header { tr { @for cell in row { th { (cell) } } } } }
            tbody { @for row in body { tr { @for cell in row { td { (cell) } } } } }
        } }
    }
}

/// What was typed, for whoever wants to do it again.
fn commands(results: &Results) -> Markup {
    html! {
        figure {
            h2 { "Command lines" }
            details {
                summary { "All runs" }
                ul { @for (key, outcome) in &results.steps { @for command in &outcome.commands {
                    li { (key) ": " code { (command) } }
                } } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::outcome::Outcome;
    use super::super::summary::testing::summary;
    use super::super::table::testing::results;
    use super::*;

    #[test]
    fn the_page_is_one_file_that_asks_for_nothing_and_has_every_figure_as_text() {
        let mut results = results();
        let outcome = Outcome { commands: vec!["llama-bench -m '<x>'".into()], ..Outcome::default() };
        results.steps.insert("bench-0-cpu-moe".into(), outcome);
        let page = page(&results, &summary()).unwrap();
        assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("<script"));
        assert_eq!(page.matches("<svg").count(), summary().measures.len());
        assert!(page.contains("prefers-color-scheme: dark") && page.contains("&lt;x&gt;"));
        assert!(page.contains("5. moe-hot, fixed profile") && page.contains("<td>1.750</td>"));
    }
}
