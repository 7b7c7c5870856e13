//! Bar charts as SVG within the page: an arm's median as a bar, its pairs as dots. The style sheet gives text and grid their
//! colours, for light and dark.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

const WIDTH: u32 = 560;
const ROW: u32 = 44;
const AXIS: u32 = 54;
const LETTERS: u32 = 19;
const MARGIN: u32 = 12;
const DOT: i32 = 4;
/// As in the report of a profile: the style sheet puts its own in the place of black and of this grey.
const GRID: RGBColor = RGBColor(0xcc, 0xcc, 0xcc);
/// Stock's bars, and ours; both can be read on white and on black.
pub const STOCK: RGBColor = RGBColor(0x7a, 0x86, 0x94);
/// See [`STOCK`].
pub const OURS: RGBColor = RGBColor(0x2f, 0x7f, 0xd6);

/// One bar.
pub struct Bar {
    /// Whether it is moe-hot's.
    pub is_ours: bool,
    /// Each pair.
    pub values: Vec<f64>,
    /// Their median; `None`: nothing was counted.
    pub median: Option<f64>,
}

/// The chart as an `svg` element; the first bar is at the top. Rows are numbered from 1: the table beside it names them.
pub fn svg(bars: &[Bar], unit: &str) -> Result<String> {
    let height = ROW * bars.len() as u32 + AXIS + 2 * MARGIN;
    let mut svg = String::new();
    draw(&mut svg, bars, unit, height).map_err(|error| anyhow!("{error}"))?;
    // The name space is that of the page; without sizes of its own it takes the page's.
    let size = format!("width=\"{WIDTH}\" height=\"{height}\" ");
    let svg = svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1);
    Ok(svg.replacen(&size, "class=\"plot\" aria-hidden=\"true\" ", 1))
}

fn draw(svg: &mut String, bars: &[Bar], unit: &str, height: u32) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    let letters = ("sans-serif", LETTERS).into_font().color(&BLACK);
    let most = bars.iter().flat_map(|bar| bar.values.iter().copied()).fold(0.0, f64::max);
    let end = if most > 0.0 { 1.08 * most } else { 1.0 };
    let rows = bars.len() as f64;
    let mut chart = ChartBuilder::on(&area)
        .margin(MARGIN)
        .margin_right(2 * MARGIN)
        .x_label_area_size(AXIS)
        .y_label_area_size(34)
        .build_cartesian_2d(0.0..end, rows..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_desc(unit)
        .x_labels(6)
        .x_label_formatter(&|value: &f64| if end >= 10.0 { format!("{value:.0}") } else { format!("{value:.1}") })
        .label_style(letters.clone())
        .axis_desc_style(letters.clone())
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(BLACK)
        .draw()?;
    for (place, bar) in bars.iter().enumerate() {
        let (top, middle) = (place as f64, place as f64 + 0.5);
        let colour = if bar.is_ours { OURS } else { STOCK };
        if let Some(median) = bar.median {
            let box_ = [(0.0, top + 0.18), (median, top + 0.82)];
            chart.draw_series(std::iter::once(Rectangle::new(box_, colour.filled())))?;
        }
        let dots = bar.values.iter().map(|&value| Circle::new((value, middle), DOT, BLACK.stroke_width(2)));
        chart.draw_series(dots)?;
        let (x, y) = chart.backend_coord(&(0.0, middle));
        area.draw_text(&(place + 1).to_string(), &letters, (x - 22, y - LETTERS as i32 / 2))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_is_one_element_with_a_bar_for_each_arm_that_counted() {
        let bar = |values: &[f64], is_ours| Bar { is_ours, values: values.to_vec(), median: values.first().copied() };
        let svg = svg(&[bar(&[10.0, 12.0], false), bar(&[], true), bar(&[20.0], true)], "t/s").unwrap();
        assert!(svg.starts_with("<svg class=\"plot\"") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(!svg.contains("http"), "{svg}");
        let filled = |colour: &str| svg.matches(&format!("fill=\"{colour}\"")).count();
        assert_eq!((filled("#2F7FD6"), filled("#7A8694"), svg.matches("<circle").count()), (1, 1, 3), "{svg}");
    }

    #[test]
    fn nothing_to_draw_is_drawn() {
        assert!(svg(&[Bar { is_ours: true, values: Vec::new(), median: None }], "ms").is_ok());
    }
}
