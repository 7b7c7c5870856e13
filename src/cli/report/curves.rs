//! Line plots as SVG within the page. The style sheet gives text and grid their colours, for light and dark.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// The plot's own size; the page scales it. Small and with large letters, so that it can be read on a phone.
const SIZE: (u32, u32) = (560, 380);
const LETTERS: u32 = 21;
const LINE: u32 = 3;
const MARGIN: u32 = 12;
const LABELS: (u32, u32) = (54, 64);
/// Colours that can be read on white and on black, and told apart by the colour-blind.
pub const COLOURS: [RGBColor; 4] =
    [RGBColor(0x00, 0x9e, 0x73), RGBColor(0x2f, 0x7f, 0xd6), RGBColor(0xd5, 0x7a, 0x00), RGBColor(0xc0, 0x5a, 0xa0)];
/// The style sheet puts its own in the place of these.
const TEXT: RGBColor = BLACK;
const GRID: RGBColor = RGBColor(0xcc, 0xcc, 0xcc);

/// A plot of lines over `0..x_end`; the y axis is 0 to 100 %.
pub struct Plot<'a> {
    pub x_label: &'a str,
    pub x_end: f64,
    /// How a number of the x axis is written.
    pub x_format: &'a dyn Fn(&f64) -> String,
    /// Points with y from 0 to 1, one line each.
    pub lines: Vec<Vec<(f64, f64)>>,
}

impl Plot<'_> {
    /// The plot as an `svg` element.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("{error}"))?;
        // The name space is that of the page; without sizes of its own it takes the page's.
        let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
        Ok(svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1).replacen(
            &size,
            "class=\"plot\" aria-hidden=\"true\" ",
            1,
        ))
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error + '_>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let letters = ("sans-serif", LETTERS).into_font().color(&TEXT);
        let mut chart = ChartBuilder::on(&area)
            .margin(MARGIN)
            .margin_right(3 * MARGIN)
            .x_label_area_size(LABELS.0)
            .y_label_area_size(LABELS.1)
            .build_cartesian_2d(0.0..self.x_end, 0.0..1.0)?;
        chart
            .configure_mesh()
            .x_desc(self.x_label)
            .x_labels(6)
            .y_labels(6)
            .x_label_formatter(&self.x_format)
            .y_label_formatter(&|share| format!("{:.0} %", 100.0 * share))
            .label_style(letters.clone())
            .axis_desc_style(letters)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(TEXT)
            .draw()?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(LINE)))?;
        }
        area.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_one_element_that_asks_for_nothing() {
        let lines = vec![vec![(0.0, 0.0), (1.0, 1.0)], vec![(0.5, 0.2)]];
        let svg = Plot { x_label: "x <&>", x_end: 1.0, x_format: &|x| format!("{x:.1}"), lines }.svg().unwrap();
        assert!(svg.starts_with("<svg class=\"plot\"") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(!svg.contains("http") && svg.contains("x &lt;&amp;&gt;") && svg.contains("#2F7FD6"), "{svg}");
    }
}
