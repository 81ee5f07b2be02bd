"""How the page looks, in light and dark mode.

The colours of phases are those of Okabe and Ito, which people can tell apart whatever their colour
vision (Color Universal Design, 2008); so are the curves', and one of two is dashed.
"""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f7f8fa;--ink:#1a1d23;--soft:#5b6270;
--edge:#dfe3e8;--accent:#0072b2;--bad:#b3261e;--good:#00664b;
--read:#56b4e9;--decode:#0072b2;--compute:#009e73;--wait:#e69f00;--exchange:#cc79a7;--idle:#c3c8d0}
@media (prefers-color-scheme:dark){:root{--paper:#14171c;--card:#1c2027;--ink:#e8eaee;
--soft:#a2aab8;--edge:#333a45;--accent:#56b4e9;--bad:#ff8a80;--good:#4fd1a5;
--read:#56b4e9;--decode:#3987c9;--compute:#1fb489;--wait:#e69f00;--exchange:#d58fb6;--idle:#4a515e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:36px 0 12px}
p{margin:.4em 0}
.soft,.unit,figcaption .unit{color:var(--soft)}
.state{font-weight:600}.state.good{color:var(--good)}.state.bad{color:var(--bad)}
.finding{margin:20px 0;padding:14px 18px;background:var(--card);border-left:4px solid var(--accent);
border-radius:4px}
.finding b{font-size:1.06rem;font-weight:600}.finding p{margin:.35em 0 0}
.finding ul{margin:.6em 0 0;padding-left:1.2em;color:var(--soft)}
.error{border-left-color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px}
.tile{background:var(--card);border-radius:6px;padding:10px 14px}
.tile b{display:block;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;
white-space:nowrap}
.tile span{color:var(--soft);font-size:.82rem}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.85rem;margin:6px 0 10px}
.key{display:inline-flex;align-items:center;gap:6px}
.key i{width:12px;height:12px;border-radius:2px;display:inline-block;flex:none}
.key i.line{height:0;width:20px;border-radius:0;border-top:2.5px solid}
.key i.line.dashed{border-top-style:dashed}
.c0{stroke:var(--decode);border-color:var(--decode)!important}
.c1{stroke:var(--wait);border-color:var(--wait)!important}
.c2{stroke:var(--compute);border-color:var(--compute)!important}
.c3{stroke:var(--exchange);border-color:var(--exchange)!important}
.bar{display:flex;height:26px;border-radius:4px;overflow:hidden}
.bar i{display:block;min-width:0}
.lanes{display:grid;grid-template-columns:fit-content(17rem) minmax(0,1fr);align-items:center;
gap:4px 10px}
.lane,.under{display:contents}
.lane .name{min-width:0;font-size:.82rem;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;
text-align:right}
.lane svg{display:block;width:100%;height:24px;background:var(--card);border-radius:3px}
.many .lane svg{height:13px}.many{row-gap:2px}.many .lane .name{font-size:.74rem}
.x{position:relative;height:1.25rem;font-size:.78rem;color:var(--soft);
font-variant-numeric:tabular-nums}
.x span{position:absolute;transform:translateX(-50%);white-space:nowrap;top:3px}
.x span.first{transform:none}.x span.last{transform:translateX(-100%)}
.x-name{font-size:.78rem;color:var(--soft);text-align:center}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
gap:30px 32px}
.chart{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.95rem;overflow-wrap:anywhere}
figcaption .unit{font-weight:400}
.plot{display:grid;grid-template-columns:58px 1fr;margin-top:8px}
.y{position:relative;font-size:.78rem;color:var(--soft);font-variant-numeric:tabular-nums}
.y span{position:absolute;right:8px;transform:translateY(50%);white-space:nowrap}
.area{height:190px;border-left:1px solid var(--edge);border-bottom:1px solid var(--edge)}
.area svg{display:block;width:100%;height:100%;overflow:visible}
.plot .x,.plot .x-name{grid-column:2}
path{vector-effect:non-scaling-stroke}
.grid{stroke:var(--edge);fill:none;stroke-width:1}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.curve.dashed{stroke-dasharray:6 4}
.dot{fill:none;stroke-width:7;stroke-linecap:round}
.lost{stroke:var(--bad);stroke-width:3;fill:none}
.read{fill:var(--read);background:var(--read)}.decode{fill:var(--decode);background:var(--decode)}
.compute{fill:var(--compute);background:var(--compute)}.wait{fill:var(--wait);background:var(--wait)}
.exchange{fill:var(--exchange);background:var(--exchange)}.idle{fill:var(--idle);background:var(--idle)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.86rem;width:100%;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:right;vertical-align:bottom}
td,th{padding:5px 10px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
td.text,th.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere;min-width:96px}
td.host{white-space:nowrap}
td.wide{white-space:pre-wrap;min-width:200px}
summary{cursor:pointer;font-weight:600}
footer{margin-top:40px;font-size:.82rem;color:var(--soft)}
@media (max-width:640px){main{padding:18px 14px 36px}h1{font-size:1.35rem}
.lanes{grid-template-columns:minmax(0,1fr);gap:2px}.under>:first-child{display:none}
.lane .name{text-align:left}
.lane svg,.many .lane svg{height:18px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile b{font-size:1.08rem}}
@media print{:root{color-scheme:light}.scroll{overflow:visible}}
"""
